"""Each mistake gets one sentence that says what to do, and changes nothing."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import bullettrain as bt
from bullettrain import BulletTrain, StepBudget, baselines
from bullettrain.attacks import pgd
from bullettrain.attacks.losses import margin
from bullettrain.augmix import ViewMaker
from conftest import assert_same, batch, norm_net, snapshot

OBJECTIVES = [bt.PGDAT, bt.TRADES, bt.MART]
X, Y = batch()


class Returning(nn.Module):
    """norm_net, with its output changed."""

    def __init__(self, change):
        super().__init__()
        self.net, self.change = norm_net(), change

    def forward(self, x):
        return self.change(self.net(x))


def spoil(t, value, at=3):
    t = t.clone()
    t.view(-1)[at] = value
    return t


def refused(train, model, x, y, message, error=(ValueError, TypeError)):
    """The step raises with one sentence, and network, F_R and step count are what they were."""
    before, state = snapshot(model), train.state_dict()
    with pytest.raises(error, match=message) as caught:
        train.step(model, x, y)
    assert "\n" not in str(caught.value)
    assert_same(before, snapshot(model))
    assert train.state_dict() == state
    assert not model._forward_hooks


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("budget", [StepBudget(2, 1), StepBudget.uniform(2)])
@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (spoil(X, 1.01), Y, r"outside \[0, 1\]; scale the images"),
        (spoil(X, -0.5), Y, r"outside \[0, 1\]"),
        (X * 255, Y, r"outside \[0, 1\]"),
        (spoil(X, float("nan")), Y, "NaN or infinite"),
        ((X * 255).to(torch.uint8), Y, "x is uint8; give floating-point images"),
        (X, Y.int(), "labels are int32; give class indices as int64"),
        (X, Y.bool(), "labels are bool; give class indices as int64, e.g. y.long()"),
        (X, Y.float(), r"labels are float32 of shape \(16,\); soft labels .* are not supported; give class indices"),
        (X, torch.rand(16, 4), r"labels are float32 of shape \(16, 4\); soft .* label_smoothing= to smooth"),
        (X, nn.functional.one_hot(Y), r"labels have the shape \(16, 4\) and look one-hot; .* y\.argmax\(1\)"),
        (X, nn.functional.one_hot(Y).int(), r"look one-hot; give class indices, e.g. y\.argmax\(1\)"),
        (X, Y[:-1], r"labels have the shape \(15,\); 16 examples need \(16,\)"),
        (X, Y[:, None], r"labels have the shape \(16, 1\) and are a column; give y\[:, 0\]"),
        (X, spoil(Y, 4), "labels range from 0 to 4; the network has 4 classes, 0 to 3"),
        (X, spoil(Y, -1), "labels range from -1 to 3"),
        (X[:0], Y[:0], "the batch is empty"),
        (X[0, 0, 0], Y[:6], "give a batch"),
        (X.tolist(), Y, "have to be tensors"),
    ],
)
def test_bad_batches(objective, budget, x, y, message):
    refused(BulletTrain(objective(), budget=budget), norm_net(), x, y, message)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("budget", [StepBudget(2, 1), StepBudget.uniform(2), StepBudget.uniform(0)])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda z: z[:, 0], r"returned the shape \(16,\) for 16 examples"),
        (lambda z: z[:, :1], r"returned the shape \(16, 1\)"),
        (lambda z: z[:3], r"returned the shape \(3, 4\)"),
        (lambda z: z[:, :, None], r"returned the shape \(16, 4, 1\)"),
        (lambda z: (z, z), r"returned tuple; it has to return logits.*; wrap it in .* returns model\(x\)\[0\]$"),
        (
            lambda z: {"out": z, "aux": z},
            r"returned dict; .* wrap it in a module whose forward returns model\(x\)\['out'\]",
        ),
        (lambda z: SimpleNamespace(logits=z), r"returned SimpleNamespace; .* returns model\(x\)\.logits$"),
        (lambda z: None, r"returned NoneType; it has to return logits, a tensor \(m, K\)$"),
        (lambda z: z * float("nan"), "NaN logits at step 1"),
        (lambda z: z.exp() * float("inf"), "infinite logits at step 1"),
        (
            lambda z: z.softmax(dim=1),
            "returned probabilities: rows add up to 1; leave out its last softmax",
        ),
        (lambda z: z.bfloat16().softmax(dim=1), "returned probabilities"),
    ],
)
def test_bad_networks(objective, budget, change, message):
    refused(BulletTrain(objective(), budget=budget), Returning(change), X, Y, message)


def test_rounding_at_the_edges_is_no_mistake():
    BulletTrain(bt.TRADES(), budget=StepBudget(2, 1)).step(norm_net(), spoil(spoil(X, 1 + 1e-6), -1e-6, 5), Y)


def test_other_bounds_are_checked_instead():
    train = BulletTrain(bt.TRADES(bounds=(-1, 1)), budget=StepBudget(2, 1))
    train.step(norm_net(), X * 2 - 1, Y)
    refused(BulletTrain(bt.TRADES(bounds=(-1, 1)), budget=StepBudget(2, 1)), norm_net(), X * 2, Y, r"outside \[-1, 1\]")


def test_checks_of_values_come_every_so_many_steps():
    train = BulletTrain(bt.TRADES(), budget=StepBudget.uniform(1), check_every=3)
    net, outside = norm_net(), X + 0.5
    train.step(net, X, Y)
    train.step(net, outside, Y)  # steps 2 and 3 are not looked at
    train.step(net, outside, Y)
    refused(train, net, outside, Y, "outside")
    off = BulletTrain(bt.TRADES(), budget=StepBudget.uniform(1), check_every=0)
    off.step(net, outside, Y)


def test_nan_that_appears_in_mid_training_names_its_step():
    train = BulletTrain(bt.MART(), budget=StepBudget(1, 0), check_every=2)
    net = norm_net()
    for _ in range(4):
        train.step(net, X, Y)
    with torch.no_grad():
        net[0].weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN logits at step 5"):
        train.step(net, X, Y)


def trained(step_size=None, scale=None, **settings):
    return BulletTrain(bt.TRADES(**settings), budget=StepBudget(3, 3, step_size=step_size, scale=scale))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bt.TRADES(eps=0), "eps is 0"),
        (lambda: bt.MART(eps=-1), "eps is -1"),
        (lambda: bt.PGDAT(eps=float("inf")), "eps is inf"),
        (lambda: bt.TRADES(eps=8), r"eps is 8, but pixels are in \[0, 1\]; did you mean 8/255"),
        (lambda: bt.TRADES(eps=torch.full((3, 1, 1), 8.0)), "eps is 8, but pixels .* did you mean 8/255"),
        (lambda: bt.TRADES(eps=8, norm=bt.Normalized([0.5], [0.2])), "eps is 8, but pixels .* did you mean 8/255"),
        (lambda: pgd(norm_net(), X, Y, eps=8, steps=1, step_size=2), "eps is 8, but pixels .* did you mean 8/255"),
        (lambda: pgd(norm_net(), X, Y, eps=0.1, steps=1, step_size=2), "step_size is 2, but pixels .* mean 2/255"),
        (lambda: trained(eps=8 / 255, step_size=2), "the boundary step size is 2, but pixels .* mean 2/255"),
        (lambda: trained(eps=8 / 255, scale=225), r"the boundary step size is 2\.35294, but pixels are in \[0, 1\]"),
        (lambda: trained(eps=8, bounds=(0, 255), step_size=600), r"is 600, but pixels are in \[0, 255\]"),
        (lambda: bt.TRADES(bta=6), "^TRADES takes no bta; there are beta, eps, .*; did you mean 'beta'"),
        (lambda: bt.TRADES(6.0), r"^TRADES takes its arguments by name, e\.g\. TRADES\(eps=8/255\)"),
        (lambda: bt.PGDAT(steps=3), "^PGDAT takes no steps; there are eps, norm"),
        (lambda: bt.TRADES(beta=0), "beta is 0"),
        (lambda: bt.TRADES(eps=-torch.rand(3)), "eps has values that are not above 0"),
        (lambda: bt.AugMix(beta=-2), "beta is -2"),
        (lambda: bt.AugMix(views="x"), "views are 'x'; give a ViewMaker, or a function"),
        (lambda: bt.AugMix(views=ViewMaker), "views are <class"),
        (lambda: bt.AugMix(bounds=None), "give your own views"),
        (lambda: bt.TRADES(selection="test"), "there are eval, train, last"),
        (lambda: bt.TRADES(bounds=(1, 1)), "low < high"),
        (lambda: bt.TRADES(norm="l3"), "linf, l2"),
        (lambda: bt.TRADES(norm=2), "no norm 2; there are linf, l2"),
        (lambda: bt.MART(norm="l2"), "give eps as well: .* in L2 0.5 is usual"),
        (lambda: bt.OracleSeparation(eps=0.1, norm=float("inf")), "no norm inf; there are linf, l2"),
        (lambda: bt.PGDAT(attack_mode="test"), "attack_mode is 'test'; there are eval, train"),
        (lambda: BulletTrain(bt.TRADES(), budget=StepBudget(2, 1), gamma=0), "gamma is 0"),
        (lambda: BulletTrain(bt.TRADES(), budget=StepBudget(2, 1), momentum=1), "momentum is 1"),
        (lambda: BulletTrain(bt.TRADES(), budget=StepBudget(2, 1), check_every=-1), "check_every"),
        (lambda: BulletTrain(bt.TRADES, budget=StepBudget(2, 1)), "give an instance, e.g. TRADES"),
        (lambda: BulletTrain(bt.TRADES(), budget=10), r"a StepBudget, e\.g\. StepBudget\(boundary=10, robust=2\)"),
        (lambda: StepBudget.uniform(10.0), "^steps is 10.0; it has to be a whole number"),
        (lambda: pgd(norm_net(), X * 9, Y, eps=0.1, steps=1, step_size=0.1), r", or give bounds=\(low, high\), or for"),
        (
            lambda: BulletTrain(bt.TRADES(), budget=StepBudget(2, 1)).load_state_dict({"model": {}}),
            r"robust_fraction and steps_taken missing; give what state_dict\(\) of BulletTrain returned",
        ),
        (
            lambda: BulletTrain(bt.TRADES(), budget=StepBudget(2, 1)).load_state_dict(None),
            "the state is None; give what",
        ),
        (
            lambda: BulletTrain(bt.TRADES(), budget=StepBudget(2, 1)).load_state_dict("a.pt"),
            "the state is 'a.pt'; give",
        ),
        (lambda: bt.Captured(BulletTrain(bt.TRADES(), budget=StepBudget(2, 1)), norm_net(), dtype="bf16"), "is 'bf16'"),
        (lambda: StepBudget(2, 5), "robust=5, outlier=0 are out of order; .* For a study, say ordered=False$"),
    ],
)
def test_bad_settings_are_refused_at_once(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize("norm", ["linf", bt.Normalized([100.0], [50.0], pixels=(0, 255))])
def test_an_eps_that_is_tiny_for_the_pixels_is_doubted(norm):
    bounds = {"bounds": (0, 255)} if norm == "linf" else {}
    with pytest.warns(UserWarning, match=r"^eps is 0.0313725, but pixels .*; did you mean 8\?$") as caught:
        bt.PGDAT(eps=8 / 255, norm=norm, **bounds)
    assert caught[0].filename == __file__
    bt.PGDAT(eps=8, norm=norm, **bounds)  # and none of these
    bt.TRADES(eps=0.3 / 255)
    bt.TRADES(eps=0.01, bounds=None)
    bt.TRADES(eps=0.01, bounds=(0, 1e6), norm="l2")
    trained(eps=0.5, scale=6.75)  # steps of 2.25·eps


@pytest.mark.parametrize("kind", [bt.PGDAT, bt.TRADES, bt.MART])
def test_help_says_the_defaults(kind):
    made = kind()
    assert f" None: {made.eps}, in L∞ only." in kind.__doc__
    assert f" None: {getattr(made, 'beta', made.eps)}" in kind.__doc__
    for part in (bt.Allocated, bt.Category):
        fields = getattr(part, "_fields", None) or part.__members__
        assert all(f"        {field}: " in part.__doc__ for field in fields)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("forward", [lambda net, x: net(x.detach()), torch.no_grad()(lambda net, x: net(x))])
def test_a_network_without_a_gradient_to_its_input_is_named(objective, forward):
    class Detached(Returning):
        def forward(self, x):
            return forward(super().forward, x)

    net = Detached(lambda z: z)
    refused(BulletTrain(objective(), budget=StepBudget.uniform(2)), net, X, Y, "^the logits have no gradient to the in")
    with pytest.raises(ValueError, match=r"^the logits have no gradient to the input; take no_grad or detach out"):
        pgd(net, X, Y, eps=0.1, steps=1, step_size=0.1)


def test_a_scheme_that_allocates_nonsense_is_named():
    class Fractions:
        uniform_steps = None

        def allocate(self, category, score=None, past=None):
            return score

        def step_sizes(self, category, steps, eps):
            return steps

    refused(
        BulletTrain(bt.PGDAT(), budget=Fractions()),
        norm_net(),
        X,
        Y,
        r"allocate returned float32 .*integer tensor of shape \(16,\), e\.g\. by \.long\(\)",
    )


def test_the_signature_of_an_objective_has_what_it_takes():
    for objective, beta, refused in (
        (bt.TRADES, 6.0, None),
        (bt.PGDAT, None, "beta"),
        (baselines.Free, None, "attack"),
    ):
        shown = inspect.signature(objective).parameters
        assert (shown["beta"].default if beta else None) == beta
        assert refused not in shown
        objective(**{name: argument.default for name, argument in shown.items()})
    assert inspect.signature(bt.MART).parameters["selection"].default == "train"


def test_an_allocation_of_several_tensors_has_to_name_them():
    class Pair(StepBudget):
        def allocate(self, category, score=None, past=None):
            return torch.ones_like(category), torch.rand(len(category))

    wrong = r"allocate returned a tuple; give Allocated\(steps, eps=…\)"
    refused(BulletTrain(bt.PGDAT(), budget=Pair(2, 1)), norm_net(), X, Y, wrong)


def test_the_first_step_after_a_resume_is_checked():
    train = BulletTrain(bt.TRADES(), budget=StepBudget.uniform(1))
    train.load_state_dict({"robust_fraction": {"value": 0.1, "gamma": 0.8, "momentum": 0.9}, "steps_taken": 50})
    refused(train, norm_net(), X * 255, Y, "outside")


def test_a_step_that_raises_unchecked_leaves_robust_fraction():
    train = BulletTrain(bt.TRADES(), budget=StepBudget.uniform(1), check_every=0)
    train.step(norm_net(), X, Y)
    state = train.state_dict()
    with pytest.raises(IndexError):
        train.step(norm_net(), X, spoil(Y, 9))
    assert train.state_dict() == state


@pytest.mark.parametrize("check_every", [100, 0])
def test_networks_that_wait_for_other_workers_are_refused(check_every):
    train = BulletTrain(bt.TRADES(), budget=StepBudget(2, 1), check_every=check_every)
    refused(train, nn.SyncBatchNorm.convert_sync_batchnorm(norm_net()), X, Y, "SyncBatchNorm")
    sharded = norm_net()
    sharded[0].__class__ = type("FSDPConv2d", (FSDPModule, nn.Conv2d), {})  # what fully_shard does
    refused(train, sharded, X, Y, "FSDPModule, .* DistributedDataParallel")


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (
            lambda z, y: z,
            r"the score returned float32 of shape \(16, 4\); it has to return: floating-point tensor of shape \(16,\)",
        ),
        (lambda z, y: z.mean(), r"the score returned float32 of shape \(\)"),
        (lambda z, y: y, "the score returned int64"),
        (lambda z, y: None, "the score returned NoneType"),
        (lambda z, y: z[:, 0] * float("nan"), "the score returned NaN"),
        (lambda z, y: z.softmax(dim=1).amax(dim=1), r"negative for none of \d+ misclassified examples"),
    ],
)
def test_a_score_that_returns_no_scores_is_named(score, message):
    refused(BulletTrain(bt.TRADES(), budget=StepBudget(2, 1), score=score), norm_net(), X, Y, message)


@pytest.mark.parametrize("budget", [StepBudget(2, 1), StepBudget.uniform(2), StepBudget.uniform(0)])
@pytest.mark.parametrize("check_every", [100, 0])
@pytest.mark.parametrize(("x", "weights"), [(X.double(), "float32"), (X.half(), "float32"), (X, "float64")])
def test_images_of_another_dtype_than_the_weights_are_named(budget, check_every, x, weights):
    train = BulletTrain(bt.TRADES(), budget=budget, check_every=check_every)
    message = f"x is .*, but the network's weights are {weights}; give x.to\\(torch.{weights}\\)"
    refused(train, norm_net().to(getattr(torch, weights)), x, Y, message)


def test_a_network_may_convert_its_images_itself():
    class Converting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = norm_net()

        def forward(self, x):
            return self.net(x.float())

    train = BulletTrain(bt.TRADES(), budget=StepBudget(2, 1))
    assert torch.isfinite(train.step(Converting(), X.double(), Y).loss)


def test_an_attack_loss_that_is_no_loss_of_each_example_is_named():
    class Method(bt.PGDAT):
        attack_loss = margin  # a function becomes a method

    class Mean(bt.PGDAT):
        attack_loss = staticmethod(lambda logits, labels, target: margin(logits, labels, target).mean())

    with pytest.raises(TypeError, match=r"attack_loss takes .*; .* \(logits, labels, target\); declare it with static"):
        BulletTrain(Method(), budget=StepBudget(2, 1))
    message = r"the attack's loss returned float32 of shape \(\); it has to return: .* of shape \(16,\)"
    refused(BulletTrain(Mean(), budget=StepBudget.uniform(2)), norm_net(), X, Y, message)


@pytest.mark.parametrize("wrong", [Y + 5, Y - 1])
def test_a_separation_into_classes_that_are_none_is_named(wrong):
    train = BulletTrain(bt.PGDAT(), budget=StepBudget(2, 1), separation=lambda svar, F_R: wrong)
    refused(train, norm_net(), X, Y, r"categories from -?\d to \d; there are 0 to 2")


def test_parts_that_are_none_are_named_at_once():
    with pytest.raises(TypeError, match="the budget is StepBudget; give an instance"):
        BulletTrain(bt.TRADES(), budget=StepBudget)
    with pytest.raises(TypeError, match="which has no uniform_steps; "):
        BulletTrain(bt.TRADES(), budget=type("Own", (), {"allocate": lambda *_: None})())
    with pytest.raises(TypeError, match="the score is 'svar'; give a function"):
        BulletTrain(bt.TRADES(), budget=StepBudget(2, 1), score="svar")
    with pytest.raises(TypeError, match=r"the separation is OracleSeparation; give an instance, .*OracleSeparation"):
        BulletTrain(bt.TRADES(), budget=StepBudget(2, 1), separation=bt.OracleSeparation)
    with pytest.raises(TypeError, match="the separation is None"):
        BulletTrain(bt.TRADES(), budget=StepBudget(2, 1), separation=None)
    for bounds in ((0, 1, 2), "ab", 1.0, torch.rand(2, 3)):
        with pytest.raises(TypeError, match="give two numbers") as caught:
            bt.PGDAT(bounds=bounds)
        assert "tensor" not in str(caught.value)


def test_an_objective_of_ones_own_that_is_not_set_up_or_returns_no_loss_is_named():
    class Bare(bt.TRADES):
        def __init__(self):
            self.beta = 6.0

    class Several(bt.TRADES):
        def loss(self, z, z_prime, y, touched=None):
            return nn.functional.cross_entropy(z, y, reduction="none")

    with pytest.raises(TypeError, match=r"Bare was not set up; call super\(\)\.__init__\(\)"):
        BulletTrain(Bare(), budget=StepBudget(2, 1))
    message = r"Several\.loss returned float32 of shape \(16,\); it has to return: 0-d floating-point tensor"
    refused(BulletTrain(Several(), budget=StepBudget(2, 1)), norm_net(), X, Y, message)


def test_label_smoothing_is_for_losses_that_apply_it():
    class Own(bt.objectives.AdversarialObjective):
        def loss(self, z, z_prime, y, touched=None, weight=None):
            return nn.functional.cross_entropy(z_prime, y)

    class Smoothed(Own):
        options = (*Own.options, "label_smoothing")

    with pytest.raises(TypeError, match=r"^Own takes no label_smoothing; leave it out"):
        Own(eps=0.15, label_smoothing=0.5)
    assert "label_smoothing" not in repr(Own())
    assert "label_smoothing=0.5" in repr(Smoothed(label_smoothing=0.5))
    with pytest.raises(TypeError, match=r"^Own takes no lable_smoothing; there are eps, norm, .*, attack$"):
        Own(lable_smoothing=0.5)


def test_a_function_is_no_network():
    with pytest.raises(TypeError, match=r"the model is <lambda>; give an nn\.Module"):
        BulletTrain(bt.TRADES(), budget=StepBudget(2, 1)).step(lambda x: x, X, Y)


def test_without_bounds_images_may_be_anything_finite():
    train = BulletTrain(bt.TRADES(bounds=None, norm="L2", eps=0.5), budget=StepBudget(2, 1))
    train.step(norm_net(), X * 255 - 100, Y)
    train = BulletTrain(train.objective, budget=train.budget)
    refused(train, norm_net(), spoil(X, float("inf")), Y, "NaN or infinite")


def test_views_of_ones_own_may_be_of_normalised_images():
    objective, budget = bt.AugMix(views=lambda x: (x, -x), bounds=(-1, 1)), StepBudget.uniform(1)
    assert torch.isfinite(BulletTrain(objective, budget=budget).step(norm_net(), 2 * X - 1, Y).loss)
    refused(BulletTrain(objective, budget=budget), norm_net(), 3 * X - 1, Y, r"outside \[-1, 1\]")
    with pytest.raises(ValueError, match="give your own views"):
        bt.AugMix(bounds=(-1, 1))


@pytest.mark.parametrize("wrong", [Y.float(), Y[:3], Y > 1, None])
def test_a_separation_that_returns_no_categories_is_named(wrong):
    train = BulletTrain(bt.PGDAT(), budget=StepBudget(2, 1), separation=lambda svar, F_R: wrong)
    refused(train, norm_net(), X, Y, "separation|subscriptable")


@pytest.mark.parametrize(
    ("views", "message"),
    [
        (lambda x: (x,), "views made 1"),
        (lambda x: (x, x[:, :1]), "it has to make two like x"),
        (lambda x: (x, x, x), "views made 3"),
        (lambda x: x, "views made float32 of shape .*; it has to make two"),
        (lambda x: None, "views made NoneType"),
        (lambda x: (x, (255 * x).to(torch.uint8)), "uint8"),
    ],
)
def test_views_that_are_not_two(views, message):
    train = BulletTrain(bt.AugMix(views=views), budget=StepBudget.uniform(1))
    with pytest.raises((ValueError, TypeError), match=message):
        train.step(norm_net(), X, Y)
    with pytest.raises(ValueError, match="start has the shape"):
        train.step(norm_net(), X, Y, start=X)


def test_negative_steps_of_a_scheme_are_refused():
    class Negative:
        uniform_steps = None

        def allocate(self, category, score=None, past=None):
            return torch.full_like(category, -1)

        def step_sizes(self, category, steps, eps):
            return torch.ones(len(steps))

    for objective in (bt.PGDAT(), bt.AugMix(views=lambda x: (x, x))):
        refused(BulletTrain(objective, budget=Negative()), norm_net(), X, Y, "it has to be at least 0")


def test_step_sizes_are_a_tensor_of_numbers():
    class OneNumber(StepBudget):
        def step_sizes(self, category, steps, eps):
            return eps

    refused(
        BulletTrain(bt.PGDAT(), budget=OneNumber(2, 1)), norm_net(), X, Y, "step_sizes returned float; it has to return"
    )


def test_parts_that_cannot_be_called_are_refused_when_they_are_given():
    class Early:
        uniform_steps = None

        def allocate(self, category):
            return category

        def step_sizes(self, category, steps, eps):
            return steps.double()

    class NoTouched(bt.PGDAT):
        def loss(self, z, z_prime, y):
            return z_prime.mean()

    budget = StepBudget(2, 1)
    with pytest.raises(TypeError, match=r"budget's allocate takes \(category\); .* \(category, score, past\)"):
        BulletTrain(bt.PGDAT(), budget=Early())
    with pytest.raises(TypeError, match=r"the score takes \(logits\); it is called with \(logits, labels\)"):
        BulletTrain(bt.PGDAT(), budget=budget, score=lambda logits: logits)
    with pytest.raises(TypeError, match=r"objective's loss takes .*; it is called with \(z, z_prime, y, touched\)"):
        BulletTrain(NoTouched(), budget=budget)
    with pytest.raises(TypeError, match="the separation takes"):
        BulletTrain(bt.PGDAT(), budget=budget, separation=lambda: None)


@pytest.mark.parametrize("budget", [StepBudget(2, 1), StepBudget(10, 0), StepBudget.uniform(3), bt.GaussianBudget(4)])
def test_augmix_is_refused_a_budget_it_cannot_have_when_it_is_built(budget):
    with pytest.raises(ValueError, match=r"AugMix was given \d+ steps; a step is both views, so 1 or 0"):
        BulletTrain(bt.AugMix(), budget=budget)
