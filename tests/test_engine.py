import copy
import dataclasses
import itertools
import typing

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn

import bullettrain as bt
import plain
import reference
from bullettrain import BulletTrain, Category, StepBudget
from bullettrain.attacks import Attack, frozen
from bullettrain.cost import Work
from bullettrain.mining import Separation
from bullettrain.models import SmallCNN
from conftest import batch, counting, norm_net, tiny_net

NAMES = {"outlier": Category.OUTLIER, "boundary": Category.BOUNDARY, "robust": Category.ROBUST}
OBJECTIVES = {"pgd": bt.PGDAT, "trades": bt.TRADES, "mart": bt.MART}
BUDGETS = [(b, r, o) for b, r, o in itertools.product(range(4), repeat=3) if b > r >= o] + [(2, 2, 2), (0, 0, 0)]


def views(x):
    return (x * 0.9, (x + 0.05).clamp(0, 1))


def engine(name, budget, **settings):
    gamma, momentum = settings.pop("gamma", 0.8), settings.pop("momentum", 0.9)
    if name == "augmix":
        return BulletTrain(bt.AugMix(views=views), budget=budget, gamma=gamma, momentum=momentum)
    return BulletTrain(OBJECTIVES[name](eps=0.05, **settings), budget=budget, gamma=gamma, momentum=momentum)


@pytest.mark.parametrize("name", ["trades", "mart", "augmix"])
@pytest.mark.parametrize("gap", [1.0, 50.0, 90.0, 120.0, 1e4])
def test_a_certain_prediction_leaves_gradients_finite(name, gap):
    """In float32 a probability is exactly 0 from a gap of 104 on, where KL's own gradient is 0 / 0."""
    objective = bt.AugMix() if name == "augmix" else OBJECTIVES[name]()
    found = []
    for dtype in (torch.float32, torch.float64):
        z = torch.tensor([[gap, 0, 0], [0, -gap, 1]], dtype=dtype, requires_grad=True)
        z_prime = torch.tensor([[1.0, 0, 0], [0, 2, 0]], dtype=dtype, requires_grad=True)
        given = torch.stack([z_prime, z_prime]) if name == "augmix" else z_prime
        objective.loss(z, given, torch.tensor([0, 2])).backward()
        found.append((z.grad.double(), z_prime.grad.double()))
    for single, double in zip(*found, strict=True):
        assert torch.allclose(single, double, atol=1e-5)  # no NaN is close


# ------------------------------------------------------------------------------ against the literal twin


@pytest.mark.parametrize("counts", BUDGETS)
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@settings(max_examples=8)
@given(
    m=st.sampled_from([1, 4, 6, 8]),
    classes=st.sampled_from([2, 3, 5]),
    F_R=st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0]),
    labels=st.sampled_from(["mixed", "mixed", "mixed", "all outliers", "no outliers"]),
    seed=st.integers(0, 50),
)
@example(m=8, classes=3, F_R=0.5, labels="mixed", seed=1)
@example(m=8, classes=2, F_R=0.5, labels="mixed", seed=2)
@example(m=4, classes=3, F_R=0.3, labels="all outliers", seed=3)
@example(m=6, classes=5, F_R=0.5, labels="no outliers", seed=4)
@example(m=1, classes=2, F_R=0.0, labels="no outliers", seed=5)
def test_a_step_is_the_literal_one(name, counts, m, classes, F_R, labels, seed):
    net = tiny_net(classes=classes, seed=seed)
    x, y = batch(m, classes=classes, channels=1, size=4, dtype=torch.float64, seed=seed)
    right = net(x).argmax(1)
    wrong = (right + 1) % classes
    mixed = torch.where(torch.arange(m) % 4 == 3, wrong, right)
    y = {"mixed": mixed, "no outliers": right, "all outliers": wrong}[labels]
    if m > 2:
        x[1], y[1] = x[0], y[0]  # a tie in SVar
    start = x + 0.02 * torch.randn(x.shape, dtype=torch.float64)

    train = engine(name, StepBudget(*counts, step_size=0.02), gamma=0.7, momentum=0.6)
    train.robust_fraction.load_state_dict({"value": F_R, "gamma": 0.7, "momentum": 0.6})
    out = train.step(net, x, y, start=start)
    gradients = torch.autograd.grad(out.loss, list(net.parameters()))

    literal = reference.step(
        net,
        list(x),
        y.tolist(),
        list(start),
        objective=name,
        F_R=F_R,
        gamma=0.7,
        p=0.6,
        N_B=counts[0],
        N_R=counts[1],
        N_O=counts[2],
        eps=0.05,
        alpha=0.02,
        beta=6.0,
    )
    if len(set(counts)) > 1:  # else nothing is selected
        assert out.category.tolist() == [NAMES[n] for n in literal["names"]]
        assert torch.allclose(out.svar, torch.tensor(literal["svar"], dtype=torch.float64), atol=1e-12)
        if (m, F_R, labels) == (8, 0.5, "mixed"):  # the ordinary batch, with all three classes
            assert set(literal["names"]) == set(NAMES)
    assert out.steps.tolist() == literal["steps"]
    assert torch.allclose(out.x_prime, torch.stack(literal["x_prime"]), atol=1e-12)
    assert out.loss.item() == pytest.approx(literal["loss"], abs=1e-12)
    for ours, theirs in zip(gradients, literal["gradients"], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-11)
    assert float(train.robust_fraction.value) == pytest.approx(literal["F_R"], abs=1e-15)


@settings(max_examples=20)
@given(counts=st.tuples(*[st.integers(0, 4)] * 3), seed=st.integers(0, 50))
def test_an_attack_that_stops_at_success_is_the_literal_one(counts, seed):
    """By categories of an oracle, too: an example moves until it is misclassified, within its number of steps."""
    net, (x, y) = tiny_net(seed=seed), batch(8, channels=1, size=4, dtype=torch.float64, seed=seed)
    y = torch.where(torch.arange(8) % 4 == 3, y, net(x).argmax(1))
    start = (x + 0.1 * torch.randn(x.shape, dtype=torch.float64)).clamp(0, 1)
    budget = StepBudget(*counts, ordered=False, scale=1.7)
    stopping = bt.PGDAT(eps=0.3, attack=Attack(stop_at_success=True))
    train = BulletTrain(stopping, budget=budget, separation=bt.OracleSeparation(steps=3))
    out = train.step(net, x, y, start=start)
    for i, steps in enumerate(out.steps.tolist()):
        at = start[i] if steps else x[i]
        for _ in range(steps):
            if net(at[None]).argmax() != y[i]:
                break
            at = reference.attack(net, x[i], int(y[i]), "ce", 1, 1.7 * 0.3 / steps, at, 0.3)
        assert torch.allclose(out.x_prime[i], at, atol=1e-12)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_misclassified_start_is_clipped_and_stays(norm, mode):
    """Also with batch norm in training mode, where the gradient of others reaches an example."""
    net, (x, y) = norm_net(), batch()
    start = x + 0.2 * torch.randn(x.shape)
    wrong = torch.arange(len(y)) % 2 == 1
    with frozen(net, mode), torch.no_grad():
        y = (net(start).argmax(1) + wrong) % 4
    objective = bt.PGDAT(eps=0.3, norm=norm, attack_mode=mode, attack=Attack(stop_at_success=True))
    out = BulletTrain(objective, budget=StepBudget.uniform(1)).step(net, x, y, start=start)
    ball = objective.ball
    stayed = ball.norm.project(start, x, ball.eps, ball.bounds)
    assert torch.equal(out.x_prime[wrong], stayed[wrong])
    assert (out.x_prime[~wrong] != stayed[~wrong]).flatten(1).any(1).all()


# ------------------------------------------------------------------- a uniform budget is the plain algorithm


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_is_the_plain_algorithm_bit_for_bit(name, dtype):
    ours, theirs = norm_net().to(dtype), norm_net().to(dtype)
    theirs.load_state_dict(ours.state_dict())
    train = engine(name, StepBudget.uniform(3, step_size=0.02))
    written_out = {"pgd": plain.pgd_at, "trades": plain.trades, "mart": plain.mart}[name]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (ours, theirs)]
    for i in range(4):
        x, y = batch(dtype=dtype, seed=i)
        start = x + 0.001 * torch.randn_like(x)
        out = train.step(ours, x, y, start=start)
        x_adv, loss = written_out(theirs, x, y, start, 3, 0.02, 0.05, 6.0)
        assert torch.equal(out.x_prime, x_adv)
        assert torch.equal(out.loss, loss)
        out.loss.backward()
        loss.backward()
        for (key, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), key
        for key, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[key]), key
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_uniform_draws_the_authors_noise_from_a_generator(kind):
    net = norm_net()
    x, y = batch()
    generator = torch.Generator().manual_seed(5)
    name = {"uniform": "pgd", "normal": "trades"}[kind]
    out = engine(name, StepBudget.uniform(2, step_size=0.02), generator=generator).step(copy.deepcopy(net), x, y)
    again = torch.Generator().manual_seed(5)
    noise = torch.empty_like(x).uniform_(-0.05, 0.05, generator=again)
    if kind == "normal":
        noise = 0.001 * torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    written_out = plain.pgd_at if kind == "uniform" else plain.trades
    assert torch.equal(out.x_prime, written_out(net, x, y, x + noise, 2, 0.02, 0.05, 6.0)[0])


# ---------------------------------------------------------------------------------------- counted work


@settings(max_examples=50)
@given(
    st.sampled_from([*sorted(OBJECTIVES), "augmix"]),
    st.sampled_from(BUDGETS),
    st.integers(1, 12),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_forwards_counted_by_a_hook_are_the_reported_work(name, counts, m, F_R, seed):
    if name == "augmix":
        counts = (1, 0, 0) if len(set(counts)) > 1 else (1, 1, 1)
    net = tiny_net(seed=seed)
    x, y = batch(m, channels=1, size=4, dtype=torch.float64, seed=seed)
    y[: m // 2] = net(x).argmax(1)[: m // 2]
    train = engine(name, StepBudget(*counts))
    train.robust_fraction.load_state_dict({"value": F_R * 0.8, "gamma": 0.8, "momentum": 0.9})
    seen = counting(net)
    out = train.step(net, x, y)
    total, touched, selects = int(out.steps.sum()), int((out.steps > 0).sum()), len(set(counts)) > 1
    assert out.steps.tolist() == [(counts[2], counts[0], counts[1])[c] for c in out.category.tolist()]

    held = {"pgd": m * selects, "trades": m if total or selects else 0, "mart": 0, "augmix": 0}[name]
    trained = {"pgd": m, "trades": m + touched, "mart": m + touched, "augmix": m + 2 * touched}[name]
    assert seen == {"held": held, "attack": 0 if name == "augmix" else total, "train": trained}
    assert out.work.total == seen["held"] + 2 * seen["attack"] + 3 * seen["train"]
    assert out.work.per_example == out.work.total / m


@pytest.mark.parametrize("name", ["pgd", "trades", "mart"])
@pytest.mark.parametrize("selection", ["eval", "train"])
@pytest.mark.parametrize("attack_mode", ["eval", "train"])
def test_other_modes_cost_what_they_report(name, selection, attack_mode):
    net = norm_net()
    x, y = batch()
    y[:8] = net.eval()(x).argmax(1)[:8]
    net.train()
    train = engine(name, StepBudget(3, 1), selection=selection, attack_mode=attack_mode)
    passes, statistics = [], net[1].num_batches_tracked.clone()

    def count(module, args, out):
        each = 2 if args[0].requires_grad else 3 if out.requires_grad else 1
        passes.append(len(args[0]) * each)

    net.register_forward_hook(count)
    out = train.step(net, x, y)
    assert out.work.total == sum(passes)
    out.loss.backward()
    assert int(net[1].num_batches_tracked - statistics) == (1 if name == "pgd" else 2)  # the loss's own forwards


def test_an_oracle_costs_its_attack():
    net = tiny_net()
    x, y = batch(20, channels=1, size=4, dtype=torch.float64)
    oracle = bt.OracleSeparation(eps=0.1, steps=10)
    train = BulletTrain(bt.PGDAT(eps=0.1), budget=StepBudget(3, 0), separation=oracle)
    seen = counting(net)
    out = train.step(net, x, y)
    assert out.work.total == seen["held"] + 2 * seen["attack"] + 3 * seen["train"]
    assert out.work.selection == 20 * (1 + 2 * 10 + 1)


# ---------------------------------------------------------------------------- scores, schemes, other parts


@pytest.mark.parametrize("score", [bt.signed_cross_entropy, bt.signed_margin, bt.signed_gradient_norm, bt.random_score])
def test_other_scores_take_svars_place(score):
    net = tiny_net()
    x, y = batch(20, channels=1, size=4, dtype=torch.float64)
    train = BulletTrain(bt.TRADES(eps=0.05), budget=StepBudget(3, 1), score=score)
    out = train.step(net, x, y)
    assert torch.equal(out.category == Category.OUTLIER, net(x).argmax(1) != y)
    if score is not bt.random_score:
        assert torch.equal(out.svar, score(net(x), y))


def test_another_allocation_scheme_replaces_the_budget_alone():
    class ByRank:
        """More steps the nearer to the boundary, whatever the class."""

        uniform_steps = None

        def allocate(self, category, score=None, past=None):
            return (score.abs().argsort().argsort() * -1 + len(score) - 1).clamp_max(4)

        def step_sizes(self, category, steps, eps):
            return 1.7 * eps / steps.clamp_min(1)

    net = tiny_net()
    x, y = batch(8, channels=1, size=4, dtype=torch.float64)
    out = BulletTrain(bt.MART(eps=0.05), budget=ByRank()).step(net, x, y)
    assert sorted(out.steps.tolist()) == [0, 1, 2, 3, 4, 4, 4, 4]
    assert torch.equal(out.x_prime[out.steps == 0], x[out.steps == 0])
    assert (out.x_prime[out.steps > 0] != x[out.steps > 0]).flatten(1).any(1).all()


def test_a_separation_of_ones_own():
    net = tiny_net()
    x, y = batch(6, channels=1, size=4, dtype=torch.float64)
    train = BulletTrain(
        bt.TRADES(), budget=StepBudget(2, 0), separation=lambda svar, F_R: torch.full_like(y, Category.ROBUST)
    )
    out = train.step(net, x, y)
    assert out.steps.sum() == 0
    assert torch.equal(out.x_prime, x)
    assert out.loss.item() == pytest.approx(F.cross_entropy(net(x), y).item())


def test_a_separation_is_given_tensors_and_need_not_be_typed_for_more():
    given = []

    def upper_half(score: torch.Tensor, robust_fraction: torch.Tensor) -> torch.Tensor:
        given.append(robust_fraction)
        return torch.where(score > score.median(), Category.ROBUST, Category.BOUNDARY)

    BulletTrain(bt.TRADES(), budget=StepBudget(2, 1), separation=upper_half).step(norm_net(), *batch())
    assert [(type(F_R), F_R.shape) for F_R in given] == [(torch.Tensor, ())]
    hints = typing.get_type_hints(upper_half)  # mypy holds a function against this, and takes a wider one as well
    assert typing.get_args(Separation) == ([hints["score"], hints["robust_fraction"]], hints["return"])


def test_l2_and_other_bounds():
    net = tiny_net()
    x, y = batch(8, channels=1, size=4, dtype=torch.float64)
    x = x * 2 - 1
    train = BulletTrain(bt.TRADES(eps=0.5, norm="l2", bounds=(-1, 1)), budget=StepBudget.uniform(3))
    delta = (train.step(net, x, y).x_prime - x).flatten(1).norm(dim=1)
    assert ((delta > 0.1) & (delta <= 0.5 + 1e-9)).all()


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_augmix_skips_the_jsd_of_untouched_examples(touched):
    m = len(touched)
    z = torch.randn(m, 5, dtype=torch.float64) * 8  # probabilities below the clamp
    z_prime = torch.stack([z, z])
    mask = torch.tensor(touched)
    z_prime[:, mask] += torch.randn(2, int(mask.sum()), 5, dtype=torch.float64)
    y = torch.randint(5, (m,))
    objective = bt.AugMix()
    total = F.cross_entropy(z, y, reduction="sum")
    for i in range(m):
        if touched[i]:
            row = slice(i, i + 1)
            total += objective.loss(z[row], z_prime[:, row], y[row]) - F.cross_entropy(z[row], y[row])
    assert torch.allclose(objective.loss(z, z_prime, y, mask), total / m)
    none = torch.zeros(m, dtype=torch.bool)
    assert torch.equal(objective.loss(z, torch.stack([z, z]), y, none), F.cross_entropy(z, y))


def test_augmix_step():
    net = norm_net()
    x, y = batch(24)
    y[:16] = net(x).argmax(1)[:16]
    train = engine("augmix", StepBudget(1, 0))
    out = train.step(net, x, y)
    boundary = out.category == Category.BOUNDARY
    assert out.z_prime.shape == (2, 24, 4)
    assert torch.equal(out.z_prime[:, ~boundary], out.z.expand(2, -1, -1)[:, ~boundary])
    assert torch.equal(out.x_prime[0, boundary], views(x[boundary])[0])
    assert out.work.per_example == pytest.approx(3 + 6 * float(boundary.double().mean()))
    out.loss.backward()
    with pytest.raises(ValueError, match="a step is both views"):
        engine("augmix", StepBudget.uniform(2)).step(net, x, y)


# ------------------------------------------------------------------------------------ in a user's own loop


def with_generators(seed):
    objective, oracle = (torch.Generator().manual_seed(seed + i) for i in range(2))
    separation = bt.OracleSeparation(steps=2, generator=oracle)
    return BulletTrain(bt.TRADES(eps=0.1, generator=objective), budget=StepBudget(3, 1), separation=separation)


def test_a_resumed_run_goes_on_with_the_noise_of_its_own_generators(tmp_path):
    net, train = norm_net(), with_generators(0)
    train.step(net, *batch())
    torch.save(train.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    twin, straight = copy.deepcopy(net), train.step(net, *batch(seed=7))
    resumed = with_generators(5)
    resumed.load_state_dict(state)
    out = resumed.step(twin, *batch(seed=7))
    assert torch.equal(out.loss, straight.loss)
    assert torch.equal(out.x_prime, straight.x_prime)
    resumed.load_state_dict({key: value for key, value in state.items() if key != "generators"})  # of an older version
    with pytest.warns(UserWarning, match="a generator of the separation, which has none here"):
        BulletTrain(resumed.objective, budget=StepBudget(3, 1)).load_state_dict(state)
    state["generators"] = {"objective": torch.zeros(16, dtype=torch.uint8)}
    with pytest.raises(ValueError, match="the objective's generator is on cpu, that of the state was elsewhere"):
        resumed.load_state_dict(state)


def test_a_state_made_with_another_gamma_says_which_is_used():
    state = BulletTrain(bt.TRADES(), budget=StepBudget(3, 1), gamma=0.7).state_dict()
    other = BulletTrain(bt.TRADES(), budget=StepBudget(3, 1), gamma=0.9)
    with pytest.warns(UserWarning, match=r"made with .* = \(0\.7, 0\.9\), used from here on, not \(0\.9") as said:
        other.load_state_dict(state)
    assert len(said) == 1
    assert other.robust_fraction.gamma == 0.7
    other.load_state_dict(state)


@pytest.mark.parametrize("name", [*sorted(OBJECTIVES), "augmix"])
def test_state_dict_resumes(name):
    budget = StepBudget(1, 0) if name == "augmix" else StepBudget(3, 1)
    net = norm_net()
    train = engine(name, budget)
    for i in range(3):
        train.step(net, *batch(seed=i))
    resumed = engine(name, budget)
    resumed.load_state_dict(train.state_dict())
    assert resumed.state_dict() == train.state_dict()
    assert resumed.state_dict()["steps_taken"] == 3
    torch.manual_seed(9)
    a = train.step(copy.deepcopy(net), *batch(seed=7))
    torch.manual_seed(9)
    b = resumed.step(copy.deepcopy(net), *batch(seed=7))
    assert torch.equal(a.loss, b.loss)


@pytest.mark.parametrize("name", [*sorted(OBJECTIVES), "augmix"])
def test_gradient_accumulation(name):
    budget = StepBudget(1, 0) if name == "augmix" else StepBudget(2, 1)
    net = tiny_net()
    parts = [batch(6, channels=1, size=4, dtype=torch.float64, seed=i) for i in range(2)]
    train = engine(name, budget)
    singles = []
    for x, y in parts:
        torch.manual_seed(1)
        state = train.state_dict()
        out = train.step(net, x, y)
        singles.append(torch.autograd.grad(out.loss / 2, list(net.parameters())))
        train.load_state_dict(state)
        torch.manual_seed(1)
        (train.step(net, x, y).loss / 2).backward()
    for p, a, b in zip(net.parameters(), *singles, strict=True):
        assert torch.allclose(p.grad, a + b)


@pytest.fixture(scope="module")
def trained():
    """A network half way through robust training on real digits, a batch, and F_R as it stands."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(labels)
    torch.manual_seed(0)
    net = SmallCNN(channels=1, image_size=8)
    train = BulletTrain(bt.TRADES(eps=0.1), budget=StepBudget(10, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.005)
    for i in range(60):
        rows = slice(128 * (i % 12), 128 * (i % 12 + 1))
        train.step(net, x[rows], y[rows]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, x[-256:], y[-256:], train.robust_fraction.state_dict()


@pytest.mark.parametrize("name", [*sorted(OBJECTIVES), "augmix"])
@pytest.mark.parametrize("counts", [(10, 2, 0), (10, 0, 0), (10, 10, 10)])
def test_bf16_autocast_agrees_with_float32(name, counts, trained):
    if name == "augmix":
        counts = tuple(min(c, 1) for c in counts)
    net, x, y, state = trained
    noise = torch.randn_like(x)
    outs = []
    for enabled in (False, True):
        train = engine(name, StepBudget(*counts))
        train.robust_fraction.load_state_dict(state)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            start = None if name == "augmix" else x + 0.001 * noise
            outs.append(train.step(copy.deepcopy(net), x, y, start=start))
    wide, half = outs
    assert half.loss.dtype == torch.float32
    assert half.loss.item() == pytest.approx(wide.loss.item(), rel=0.02)
    if wide.svar is not None:
        assert half.svar.dtype == torch.float32
        # Same categories, except where SVar's own rounding reaches a threshold.
        threshold = torch.quantile(wide.svar.double(), 1 - state["value"])
        rounding = (half.svar - wide.svar).abs().max()
        assert rounding < 0.01
        near = ((wide.svar - threshold).abs() <= 2 * rounding) | (wide.svar.abs() <= 2 * rounding)
        assert torch.equal(half.category[~near], wide.category[~near])
        assert (half.category == wide.category).float().mean() > 0.95
        assert len(set(wide.category.tolist())) == 3


def test_autocast_training_gets_every_gradient():
    net = norm_net()
    with torch.autocast("cpu", torch.bfloat16):
        out = engine("trades", StepBudget(2, 1)).step(net, *batch())
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


def test_grad_scaler():
    net = norm_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    before = net[0].weight.clone()
    with torch.autocast("cpu", torch.float16):
        out = engine("mart", StepBudget(2, 1)).step(net, *batch())
    scaler.scale(out.loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, net[0].weight)
    assert torch.isfinite(net[0].weight).all()


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_a_compiled_module_gives_the_same(name):
    torch.compiler.reset()
    net = norm_net()
    compiled = torch.compile(copy.deepcopy(net), backend="aot_eager")
    x, y = batch()
    y[:8] = net.eval()(x).argmax(1)[:8]
    net.train()
    start = x + 0.001 * torch.randn_like(x)
    outs = [engine(name, StepBudget(2, 1)).step(m, x, y, start=start) for m in (net, compiled)]
    assert torch.equal(outs[0].category, outs[1].category)
    assert torch.allclose(outs[0].x_prime, outs[1].x_prime, atol=1e-6)
    assert torch.allclose(outs[0].loss, outs[1].loss, rtol=1e-5)
    for out in outs:
        out.loss.backward()
    for a, b in zip(net.parameters(), compiled.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-6)


def test_channels_last_gives_the_same():
    net = norm_net()
    x, y = batch()
    start = x + 0.001 * torch.randn_like(x)
    last = copy.deepcopy(net).to(memory_format=torch.channels_last)
    a = engine("trades", StepBudget(2, 1)).step(net, x, y, start=start)
    b = engine("trades", StepBudget(2, 1)).step(last, x.to(memory_format=torch.channels_last), y, start=start)
    assert torch.allclose(a.loss, b.loss, rtol=1e-5)
    assert torch.equal(a.category, b.category)


def test_a_network_left_in_eval_mode_still_trains_in_training_mode():
    net = norm_net().eval()
    engine("trades", StepBudget(2, 1)).step(net, *batch())
    assert not any(module.training for module in net.modules())
    assert int(net[1].num_batches_tracked) >= 1


def test_frozen_batch_norm_stays_frozen():
    net = norm_net()
    net[1].eval()
    engine("trades", StepBudget(2, 1)).step(net, *batch())
    assert int(net[1].num_batches_tracked) == 0


def wants_two():
    """A network whose batch norm refuses a single example in training mode, behind one that does not."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("attack_mode", ["eval", "train"])
def test_one_touched_example_passes_a_batch_norm_that_wants_two(compiled, attack_mode):
    torch.compiler.reset()
    net = wants_two()
    model = torch.compile(net, backend="aot_eager") if compiled else net
    x, y = batch(8)
    only = torch.tensor([Category.BOUNDARY] + [Category.OUTLIER] * 7)
    objective = bt.TRADES(attack_mode=attack_mode)
    train = BulletTrain(objective, budget=StepBudget(2, 0), separation=lambda svar, F_R: only)
    train.step(model, x, y).loss.backward()
    assert all(module.training for module in net.modules())
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())
    assert int(net[1].num_batches_tracked) == int(net[4].num_batches_tracked) == 1  # the clean forward's alone


@pytest.mark.parametrize("name", ["trades", "mart", "augmix"])
def test_untouched_examples_add_no_divergence_not_even_to_the_gradient(name):
    objective = bt.AugMix() if name == "augmix" else OBJECTIVES[name]()
    z = torch.tensor([[200.0, 0, 0], [1.0, 0, 0]], requires_grad=True)  # the first softmax underflows
    z_prime = torch.stack([z, z]) if name == "augmix" else z.clone()
    objective.loss(z, z_prime, torch.zeros(2, dtype=torch.int64), torch.tensor([1])).backward()
    assert torch.isfinite(z.grad).all()


def test_a_frozen_batch_norm_stays_frozen_in_an_attack_in_training_mode():
    net = norm_net()
    net[1].eval()
    modes = []
    net[1].register_forward_hook(lambda module, args, out: modes.append(module.training))
    engine("trades", StepBudget.uniform(2), attack_mode="train").step(net, *batch())
    assert modes == [False] * 5  # target, two steps, clean, corrupted


def test_augmix_takes_views_that_were_made_before():
    net = norm_net()
    x, y = batch(12)
    y[:9] = net(x).argmax(1)[:9]
    made = torch.stack(views(x))
    before = BulletTrain(bt.AugMix(), budget=StepBudget(1, 0)).step(copy.deepcopy(net), x, y, start=made)
    on_the_spot = engine("augmix", StepBudget(1, 0)).step(copy.deepcopy(net), x, y)
    assert torch.equal(before.loss, on_the_spot.loss)


def test_no_hook_is_left_behind():
    net = norm_net()
    engine("mart", StepBudget(2, 1)).step(net, *batch())
    assert not net._forward_hooks


def test_the_output_holds_no_graph_but_the_losss():
    out = engine("mart", StepBudget(2, 1)).step(norm_net(), *batch())
    assert out.loss.requires_grad
    assert not any(t.requires_grad for t in (out.category, out.steps, out.svar, out.x_prime, out.z, out.z_prime))


def test_the_output_prints_as_figures_not_as_images():
    out = engine("trades", StepBudget(3, 1)).step(norm_net(), *batch(8))
    out = dataclasses.replace(out, loss=torch.tensor(0.51239), category=torch.tensor([0, 1, 1, 1, 1, 1, 2, 2]))
    out = dataclasses.replace(out, steps=torch.tensor([0, 3, 3, 3, 3, 3, 1, 1]), work=Work(8, 8, 38, 50))
    assert repr(out) == "StepOutput(loss=0.5124, outlier=1, boundary=5, robust=2, mean_steps=2.12, passes=12.00)"
    assert out.shares == {"outlier": 1 / 8, "boundary": 5 / 8, "robust": 2 / 8}
    only = dataclasses.replace(out, category=torch.zeros(8, dtype=torch.int64))
    assert "outlier=8, boundary=0, robust=0" in repr(only)
    assert only.shares == {"outlier": 1.0, "boundary": 0.0, "robust": 0.0}


def test_an_engine_prints_as_its_settings_in_a_line():
    settings = "norm=Linf, bounds=(0, 1), attack_mode='eval', selection='eval', label_smoothing=0"
    trades = f"TRADES(beta=6, eps=0.0313725, {settings})"
    train = BulletTrain(bt.TRADES(eps=8 / 255), budget=StepBudget(10, 2))
    assert repr(train.objective) == trades
    assert repr(train) == (
        f"BulletTrain({trades}, budget=StepBudget(boundary=10, robust=2, outlier=0, ordered=True), gamma=0.8, "
        "momentum=0.9, score=signed_prediction_variance, separation=separate, check_every=100)"
    )
    oracle = bt.OracleSeparation(steps=3, generator=torch.Generator())
    assert repr(oracle) == "OracleSeparation(steps=3, generator=Generator)"
    assert "separation=OracleSeparation(steps=3" in repr(
        BulletTrain(bt.MART(), budget=StepBudget(1, 0), separation=oracle)
    )
    views = "ViewMaker(severity=3, width=3, depth=-1, all_ops=False)"
    assert repr(bt.AugMix()) == f"AugMix(views={views}, beta=12, jsd=True, selection='train', bounds=(0, 1))"
    nfgsm = bt.PGDAT(attack=Attack(start="uniform", radius=2.0, project=False))
    assert repr(nfgsm).endswith(
        "attack=Attack(start='uniform', radius=2, project=False, ascent=WholeNetwork, stop_at_success=False), "
        "label_smoothing=0)"
    )

    class Own(bt.PGDAT):
        def __init__(self, depth, **others):
            super().__init__(**others)

    assert repr(Own(3, eps=0.1)).startswith("Own(eps=0.1, norm=Linf")  # its depth it did not keep


@pytest.mark.parametrize("wrong", [None, "labels"])
def test_checks_do_not_break_the_graph_of_a_network_that_is_compiled_in_place(wrong):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    net, (x, y) = norm_net(), batch()
    net.compile(backend="eager")
    train = engine("trades", StepBudget(2, 1))
    if wrong:
        with pytest.raises(ValueError, match="labels range from"):
            train.step(net, x, y + 9)
    else:
        train.step(net, x, y).loss.backward()
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("kind", [bt.PGDAT, bt.TRADES, bt.MART])
def test_labels_are_smoothed_in_the_loss_as_torch_does(kind):
    z, z_prime, y = torch.randn(8, 4).double(), torch.randn(8, 4).double(), torch.arange(8) % 4
    plain, smoothed = (kind(label_smoothing=s).loss(z, z_prime, y) for s in (0.0, 0.2))
    logits = z if kind is bt.TRADES else z_prime
    hard, soft = (torch.nn.functional.cross_entropy(logits, y, label_smoothing=s) for s in (0.0, 0.2))
    assert smoothed - plain == pytest.approx(float(soft - hard), abs=1e-12)
    weighted = kind(label_smoothing=0.2).loss(z, z_prime, y, None, torch.ones(8).double())
    assert weighted == pytest.approx(float(smoothed), abs=1e-12)
    with pytest.raises(ValueError, match=r"label_smoothing is 1; it has to be at least 0 and below 1"):
        kind(label_smoothing=1)
