"""What changes between captured steps is noticed, and gradients add up however phases are made: beside plain steps."""

import copy
import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

import bullettrain as bt
from bullettrain import Captured, StepBudget, baselines
from bullettrain.engine import captured as module
from bullettrain.engine.cuda_graphs import _difference
from bullettrain.engine.forwards import Forwards
from bullettrain.engine.phases import Batch, Phases
from conftest import batch, norm_net, tiny_net
from emulated import EmulatedRunner


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(module, "_on_gpu", lambda x: True)
    monkeypatch.setattr(module, "CudaGraphRunner", EmulatedRunner)


def ignore(text):
    """Take no notice of a message."""


def make(budget=None, objective=None, **settings):
    return bt.BulletTrain(objective or bt.PGDAT(eps=0.05), budget=budget or StepBudget.uniform(3), **settings)


# ------------------------------------------------------------------------------------------------- settings


def radius(value):
    return torch.full((3, 1, 1), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("replaced", [True, False])
def test_a_changed_tensor_of_radii_is_the_one_that_is_used(on_gpu, replaced, dtype):
    objective = bt.PGDAT(eps=radius(8 / 255))
    x, y = batch(dtype=dtype)
    fast = Captured(make(objective=objective), norm_net().to(dtype))
    for eps in (8 / 255, 8 / 255, 16 / 255, 16 / 255):
        if not torch.equal(objective.eps, radius(eps)):
            objective.eps = radius(eps) if replaced else objective.eps.fill_(eps)
        out = fast.step(x, y, start=x.clone())
        assert (out.x_prime - x).abs().max() == pytest.approx(eps, rel=1e-4)
    assert fast.reason is None


def test_changed_tensors_of_bounds_are_the_ones_that_are_used(on_gpu):
    x, y = batch()
    objective = bt.PGDAT(eps=0.05, bounds=(torch.zeros(3, 1, 1), torch.ones(3, 1, 1)))
    fast = Captured(make(objective=objective), norm_net())
    fast.step(x, y)
    objective.bounds = torch.full((3, 1, 1), 0.01), torch.full((3, 1, 1), 0.99)
    x = x.clamp(0.01, 0.99)
    assert fast.step(x, y).x_prime.min() >= 0.01 - 1e-6


class Own:
    uniform_steps = None

    def __init__(self):
        self.most = 2

    def allocate(self, category, score=None, past=None):
        return torch.full_like(category, self.most)

    def step_sizes(self, category, steps, eps):
        return torch.full_like(steps, 0.01, dtype=torch.float64)


class ScoreBy:
    sign = 1.0

    def __call__(self, logits, y):
        return self.sign * bt.signed_margin(logits, y)


def test_a_changed_attribute_inside_a_part_is_noticed(on_gpu):
    x, y = batch(channels=1, size=4, dtype=torch.float64)
    own = Own()
    fast = Captured(make(bt.ShuffledBudget(own, 0.05)), tiny_net())
    for own.most in (2, 2, 5, 5):
        assert set(fast.step(x, y).steps.tolist()) == {own.most}
    score = ScoreBy()
    fast = Captured(make(StepBudget(2, 1), score=score, check_every=0), tiny_net())
    before = fast.step(x, y).svar
    score.sign = 2.0
    torch.testing.assert_close(fast.step(x, y).svar, 2 * before)
    assert fast.reason is None


# -------------------------------------------------------------------------------------------- the frozen copy


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scale = norm_net(), 1.0
        self.register_buffer("mask", torch.ones(3, 1, 1, dtype=torch.bool))

    def forward(self, x):
        return self.net(x * self.mask) * self.scale


class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.out = nn.Parameter(torch.randn(6, 4, dtype=torch.cdouble)), nn.Linear(72, 4)

    def forward(self, x):
        return self.out((torch.fft.fft(x) @ self.w).real.flatten(1))


def masks(net):
    net.mask[0] = False


def turns(net):
    net.w.data.mul_(-1)


@pytest.mark.parametrize(("kind", "change"), [(Masked, masks), (Fourier, turns)])
def test_attacks_see_changed_masks_and_complex_weights(on_gpu, kind, change):
    net = kind().double()
    twin = copy.deepcopy(net)
    trains = [make(objective=bt.TRADES(eps=0.05)) for _ in range(2)]
    fast = Captured(trains[0], net)
    for i in range(6):
        x, y = batch(seed=i, dtype=torch.float64)
        if i == 3:
            change(net)
            change(twin)
        mine, plain = fast.step(x, y, start=x + 0.01), trains[1].step(twin, x, y, start=x + 0.01)
        torch.testing.assert_close(mine.x_prime, plain.x_prime, rtol=0, atol=1e-6)
    assert fast.reason is None


def test_steps_are_plain_once_a_replay_has_differed(on_gpu):
    """A number that a module holds was copied: only the module itself knows the new one."""
    net, said = Masked(), []
    fast = Captured(make(check_every=1), net, on_message=said.append)
    for i in range(8):
        if i == 2:
            net.scale = -3.0
        fast.step(*batch(seed=i))
    twin = copy.deepcopy(net)
    x, y = batch(seed=9)
    mine, plain = fast.step(x, y, start=x + 0.01), make().step(twin, x, y, start=x + 0.01)
    assert torch.equal(mine.x_prime, plain.x_prime)
    assert "a replay of learn differs" in fast.reason
    assert len(said) == 1


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_network_that_cannot_be_copied_takes_plain_steps(on_gpu):
    import torch.nn.utils.prune

    net, said = norm_net().double(), []
    torch.nn.utils.prune.l1_unstructured(net[0], "weight", 0.5)
    twin = norm_net().double()
    twin.load_state_dict({**net.state_dict(), "0.weight": net[0].weight}, strict=False)
    fast = Captured(make(), net, on_message=said.append)
    x, y = batch(dtype=torch.float64)
    for _ in range(2):
        out, plain = fast.step(x, y, start=x.clone()), make().step(twin, x, y, start=x.clone())
        torch.testing.assert_close(out.z_prime, plain.z_prime)
    assert len(said) == 1
    assert said[0].startswith("CUDA graphs are off, steps run one by one: the network cannot be copied: ")


def test_norms_without_running_statistics_are_attacked_as_in_the_plain_step(on_gpu):
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten(), nn.Linear(64, 4)
    ).double()
    x, y = batch(12, dtype=torch.float64)
    y = net(x).argmax(1)
    outs = []
    for captured in (True, False):
        train, twin = make(StepBudget(4, 2)), copy.deepcopy(net)
        train.robust_fraction.load_state_dict({"value": 0.4, "gamma": 0.8, "momentum": 0.9})
        step = Captured(train, twin).step if captured else lambda *a, t=train, n=twin, **k: t.step(n, *a, **k)
        outs.append(step(x, y, start=x + 0.01))
    assert len(set(outs[0].steps.tolist())) == 2
    torch.testing.assert_close(outs[0].x_prime, outs[1].x_prime)


# -------------------------------------------------------------------------------------------------- gradients


def gradient(net):
    return net[1].weight.grad


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("what", ["eps", "size"])
def test_gradients_add_up_when_phases_are_made_anew(request, gpu, what):
    if gpu:
        request.getfixturevalue("on_gpu")
    x, y = batch(channels=1, size=4, dtype=torch.float64)
    net = tiny_net()
    train = make() if what == "eps" else baselines.one_step(baselines.GradAlign(eps=0.05))
    fast, found = Captured(train, net, on_message=ignore), []
    for i, accumulate in enumerate((False, True, False)):
        if i == 1 and what == "eps":
            train.objective.eps = 0.06
        part = slice(0, 16 if i else 8)
        fast.step(x[part], y[part], start=x[part].clone(), accumulate=accumulate)
        found.append(gradient(net).clone())
    torch.testing.assert_close(found[1], found[0] + found[2])


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_zero_grad_is_where_accumulation_starts(request, gpu, to_none):
    if gpu:
        request.getfixturevalue("on_gpu")
    x, y = batch(channels=1, size=4, dtype=torch.float64)
    net = tiny_net()
    fast, norms = Captured(make(), net, on_message=ignore), []
    for _ in range(3):
        net.zero_grad(set_to_none=to_none)
        for _ in range(2):
            fast.step(x, y, start=x.clone(), accumulate=True)
        norms.append(gradient(net).norm().item())
    assert norms == pytest.approx([norms[0]] * 3)


def test_a_replay_with_nan_differs_from_one_without():
    zero, one, nan = torch.zeros(3), torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert _difference([zero], [one], [one], 1) == 0
    assert _difference([zero], [nan], [nan], 1) == 0
    assert _difference([zero], [one], [nan], 1) > 1e6
    assert _difference([zero], [nan], [one], 0) > 1e6


# ---------------------------------------------------------------------------------------------- plain steps


def test_attacks_of_a_group_see_the_statistics_after_its_clean_forwards():
    """As in a group of one, where the training-mode forward that selects comes before the attack."""
    net = norm_net().double()
    given = [batch(dtype=torch.float64, seed=seed) for seed in (1, 2)]
    after = copy.deepcopy(net)
    for x, _ in given:
        after(x)
    objective = bt.MART(eps=0.05)
    fast = Captured(make(StepBudget(4, 4, 1), objective), net, attack_group=2, capture=False)
    batches = [Batch(x, y, x + 0.01) for x, y in given]
    for one, out in zip(batches, fast.updates(batches), strict=True):
        sizes = StepBudget(4, 4, 1).step_sizes(out.category, out.steps, 0.05)
        steps = {"eps": 0.05, "steps": out.steps, "step_size": sizes, "start": one.start}
        torch.testing.assert_close(out.x_prime, bt.attacks.pgd(after, one.x, one.y, **steps))


@pytest.mark.parametrize(
    "train",
    [
        make(StepBudget(3, 2), bt.MART()),
        make(StepBudget(3, 2), bt.PGDAT(selection="train")),
        make(objective=bt.TRADES(attack_mode="train"), budget=StepBudget.uniform(3, scale=2.25)),
    ],
)
@pytest.mark.filterwarnings("ignore:the attack moves")
def test_a_batch_of_one_passes_a_norm_that_wants_two(train):
    net = nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    assert torch.isfinite(train.step(net, *batch(1)).loss)


class Deciding(Own):
    def __init__(self, **fields):
        self.fields = fields

    def allocate(self, category, score=None, past=None):
        return bt.Allocated(torch.full_like(category, 2), **self.fields)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"weight": torch.ones(16, 1)}, TypeError, r"the budget's weight returned float32 of shape \(16, 1\)"),
        ({"eps": 0.1}, TypeError, "the budget's eps returned float; it has to return: floating-point tensor of shape"),
        ({"eps": torch.full((16,), 8.0)}, ValueError, r"eps is 8, but pixels are in \[0, 1\]; did you mean 8/255"),
        ({"eps": torch.full((16,), -0.1)}, ValueError, "the budget's eps: some are negative, NaN or infinite"),
        ({"weight": torch.full((16,), -1.0)}, ValueError, "the budget's weight: some are negative"),
        (
            {"step_sizes": torch.full((16,), float("nan"))},
            ValueError,
            "the budget's step_sizes: some are negative, NaN",
        ),
    ],
)
def test_what_an_allocation_decides_is_checked(fields, error, message):
    with pytest.raises(error, match=message):
        make(Deciding(**fields)).step(tiny_net(channels=3, size=6), *batch(dtype=torch.float64))


def test_a_loss_that_takes_no_weight_is_named():
    class Plain(bt.objectives.AdversarialObjective):
        def loss(self, z, z_prime, y, touched=None):
            return nn.functional.cross_entropy(z_prime, y)

    train = make(Deciding(weight=torch.ones(16)), Plain(eps=0.05))
    with pytest.raises(TypeError, match=r"Plain's loss takes .*it is called with \(z, z_prime, y, touched, weight\)"):
        train.step(tiny_net(channels=3, size=6), *batch(dtype=torch.float64))


def test_steps_that_contradict_uniform_steps_are_refused():
    class Both(StepBudget):
        def allocate(self, category, score=None, past=None):
            return torch.arange(len(category)) % 3

    with pytest.raises(ValueError, match="the budget's uniform_steps is 5, but allocate returned other steps"):
        make(Both(5, 5, 5)).step(tiny_net(), *batch(6, channels=1, size=4, dtype=torch.float64))


def test_a_plain_step_does_not_import_dynamo():
    """Imported after init_process_group it holds the group, in default arguments of torch.distributed.nn."""
    program = """
import sys, torch, bullettrain as bt
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
train = bt.BulletTrain(bt.TRADES(eps=0.1), budget=bt.StepBudget(2, 1, scale=2.25))
train.step(net, torch.rand(4, 1, 2, 2), torch.tensor([0, 1, 2, 0]))
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_steps_leave_no_reference_cycles():
    """Garbage that holds a network would wait for the collector, and gloo's threads for the interpreter's end."""
    train, net, (x, y) = make(), tiny_net(), batch(channels=1, size=4, dtype=torch.float64)
    fast = Captured(train, net, on_message=ignore)
    gc.collect()
    gc.disable()
    try:
        train.step(net, x, y)
        fast.step(x, y)
        del fast
        assert not [thing for thing in gc.get_objects() if type(thing) in (Phases, Forwards, Captured)]
    finally:
        gc.enable()
