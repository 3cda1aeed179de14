"""`Captured` in a loop of one's own: the gradients of the plain step, by recorded and replayed pieces, or plainly."""

import copy
import itertools

import pytest
import torch
from torch import nn

import bullettrain as bt
from bullettrain import Captured, StepBudget, baselines
from bullettrain.attacks import Attack
from bullettrain.engine import captured as module
from bullettrain.models import WideResNet
from conftest import batch, norm_net, tiny_net
from emulated import EmulatedRunner


@pytest.fixture
def on_gpu(monkeypatch):
    """As if there were one: pieces are recorded once, and replayed."""
    monkeypatch.setattr(module, "_on_gpu", lambda x: True)
    monkeypatch.setattr(module, "CudaGraphRunner", EmulatedRunner)


def makers():
    generator = torch.Generator()

    def seeded(kind, **settings):
        return kind(**settings, generator=generator.manual_seed(7))

    return {
        "trades": lambda: bt.BulletTrain(seeded(bt.TRADES, eps=0.05), budget=StepBudget(4, 2)),
        "mart": lambda: bt.BulletTrain(seeded(bt.MART, eps=0.05), budget=StepBudget(4, 1)),
        "pgd-at": lambda: bt.BulletTrain(seeded(bt.PGDAT, eps=0.05), budget=StepBudget(3, 1)),
        "plain": lambda: bt.BulletTrain(seeded(bt.TRADES, eps=0.05), budget=StepBudget.uniform(3)),
        "yopo": lambda: baselines.yopo(seeded(bt.TRADES, eps=0.05)),
        "grad-align": lambda: baselines.one_step(seeded(baselines.GradAlign, eps=0.05)),
        "free": lambda: baselines.one_step(baselines.Free(eps=0.05)),
        "gat": lambda: baselines.one_step(seeded(baselines.GAT, eps=0.05)),
        "nuat": lambda: baselines.one_step(seeded(baselines.NuAT, eps=0.05)),
        "fgsm-pgi": lambda: baselines.one_step(seeded(baselines.FGSMPGI, eps=0.05)),
    }


def data(n, sizes=(16, 16, 9)):
    for i in range(n):
        x, y = batch(sizes[i % len(sizes)], size=8, dtype=torch.float64, seed=i)
        yield x, y


def parts(net, kind=torch.optim.SGD, **more):
    optimizer = kind(net.parameters(), lr=0.05, **more)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def same(mine, expected):
    for (key, a), b in zip(mine.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=key)


@pytest.mark.parametrize("name", makers())
def test_a_loop_with_it_trains_what_the_plain_loop_trains(on_gpu, name):
    """With an optimiser and a schedule of the loop's, clipping, and batches of two sizes."""
    nets = [WideResNet(10, 1, num_classes=4).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    trains = [makers()[name]() for _ in range(2)]
    for train in trains:
        train.robust_fraction.load_state_dict({"value": 0.4, "gamma": 0.8, "momentum": 0.9})
    fast = Captured(trains[1], nets[1], size_multiple=1)
    loops = [parts(net, torch.optim.AdamW) for net in nets]
    states = [torch.Generator().manual_seed(7).get_state() for _ in range(2)]
    for x, y in data(6):
        outs = []
        for i, (train, net, (optimizer, schedule)) in enumerate(zip(trains, nets, loops, strict=True)):
            generator = getattr(train.objective, "generator", None)  # one for both: each goes on where it was
            if generator is not None:
                generator.set_state(states[i])
            if i == 0:
                out = train.step(net, x, y)
                out.loss.backward()
            else:
                out = fast.step(x, y)
                assert not out.loss.requires_grad
            if generator is not None:
                states[i] = generator.get_state()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if i == 0:
                optimizer.zero_grad()
            outs.append(out)
        for field in ("loss", "category", "steps", "x_prime", "z_prime"):
            a, b = (getattr(out, field).detach() for out in outs)
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=field)
    same(nets[1], nets[0])
    assert fast.reason is None
    assert trains[1].steps_taken == trains[0].steps_taken == 6
    assert trains[1].state_dict()["robust_fraction"] == pytest.approx(trains[0].state_dict()["robust_fraction"])


def test_outputs_stay_what_they_were(on_gpu):
    net = norm_net().double()
    fast = Captured(makers()["trades"](), net)
    outs = [fast.step(x, y) for x, y in data(4, (16, 9))]
    copies = [out.clone() for out in outs]
    assert len({tuple(out.steps.tolist()) for out in outs}) > 1
    for x, y in data(3):
        fast.step(x, y)
    for out, kept in zip(outs, copies, strict=True):
        assert torch.equal(out.x_prime, kept.x_prime)
        assert torch.equal(out.loss, kept.loss)


@pytest.mark.parametrize("gpu", [True, False])
def test_groups_are_attacked_at_once_and_updated_one_by_one(request, gpu):
    if gpu:
        request.getfixturevalue("on_gpu")
    start = norm_net().double()
    found = []
    for k in (1, 3):
        net, train = copy.deepcopy(start), makers()["trades"]()
        fast = Captured(train, net, attack_group=k, size_multiple=1, on_message=lambda text: None)
        optimizer, _ = parts(net)
        batches = list(data(3, (16,)))
        updates = 0
        for _ in range(2):
            groups = [batches] if k == 3 else [[one] for one in batches]
            for group in groups:
                for out in fast.steps(group):
                    assert len(out.category) == 16
                    optimizer.step()
                    updates += 1
        assert updates == train.steps_taken == 6
        found.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.isfinite(p).all() for p in found[1])
    apart = max((a - b).abs().max().item() for a, b in zip(*found, strict=True))
    assert 0 < apart < 0.1  # attacked with weights of two updates ago
    with pytest.raises(ValueError, match="more mini-batches were given at once than attack_group=1"):
        Captured(makers()["trades"](), start, on_message=print).steps(batches)
    endless = itertools.cycle(batches)
    with pytest.raises(ValueError, match=r"give e.g. list\(itertools.islice\(batches, 2\)\)"):
        Captured(makers()["trades"](), start, attack_group=2, on_message=print).steps(endless)
    one_by_one = Captured(makers()["trades"](), start, attack_group=2, on_message=lambda text: None).steps(
        iter(batches[:2])
    )
    assert len(list(one_by_one)) == 2


def test_a_step_without_gradients_is_refused():
    x, y = next(data(1))
    with torch.no_grad(), pytest.raises(ValueError, match="gradients are disabled around a step"):
        Captured(makers()["trades"](), norm_net().double(), on_message=print).step(x, y)


def test_gradients_are_set_anew_and_those_of_frozen_and_unused_weights_are_none(on_gpu):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.unused = norm_net(), nn.Linear(3, 3)

        def forward(self, x):
            return self.body(x)

    net = Net().double()
    net.body[0].weight.requires_grad_(False)
    fast = Captured(makers()["trades"](), net, size_multiple=1)
    x, y = next(data(1))
    fast.step(x, y)
    first = {name: p.grad for name, p in net.named_parameters()}
    assert first["body.0.weight"] is None
    assert first["unused.weight"] is None
    assert first["body.1.weight"] is not None
    values = [g.clone() for g in first.values() if g is not None]
    for g in first.values():
        if g is not None:
            g.add_(100.0)  # what a loop leaves in them does not matter
    net.zero_grad()
    for name, p in net.named_parameters():
        assert p.grad is None, name
    twin = copy.deepcopy(net)
    other = makers()["trades"]()
    other.load_state_dict(fast.train.state_dict())  # its noise, too
    fast.step(x, y)
    assert [p.grad is None for p in net.parameters()] == [g is None for g in first.values()]
    other.step(twin, x, y).loss.backward()
    for mine, expected in zip(net.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (expected.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, expected.grad, rtol=0, atol=1e-10)
    assert len(values) == sum(p.grad is not None for p in net.parameters())


def test_what_changes_is_captured_anew_and_what_keeps_changing_is_left(on_gpu):
    net, said = norm_net().double(), []
    train = makers()["trades"]()
    fast = Captured(train, net, size_multiple=1, on_message=said.append)
    twin, plain = copy.deepcopy(net), makers()["trades"]()
    batches = list(data(3))
    changes = [
        lambda train, net: None,
        lambda train, net: setattr(train.objective, "eps", 0.02),
        lambda train, net: net[0].weight.requires_grad_(False),
        lambda train, net: net.eval(),  # the loss is taken in training mode all the same
        lambda train, net: setattr(train.robust_fraction, "gamma", 0.5),
    ]
    generator = plain.objective.generator = train.objective.generator
    for change in changes:
        for x, y in batches:
            state = generator.get_state()
            change(train, net)
            fast.step(x, y)
            change(plain, twin)
            twin.zero_grad()
            generator.set_state(state)
            plain.step(twin, x, y).loss.backward()
            for mine, expected in zip(net.parameters(), twin.parameters(), strict=True):
                assert (mine.grad is None) == (expected.grad is None)
                if mine.grad is not None:
                    torch.testing.assert_close(mine.grad, expected.grad, rtol=0, atol=1e-10)
            same(net, twin)
    assert len(said) == 1
    assert "keep changing" in said[0]
    assert "keep changing" in fast.reason


def beside(fast, plain, twin, x, y):
    """A captured step and the plain one on a twin, from the same noise: their gradients, and what is left of both."""
    generator = fast.train.objective.generator
    if generator is not None:
        plain.objective.generator = generator
        state = generator.get_state()
    out = fast.step(x, y)
    if generator is not None:
        generator.set_state(state)
    twin.zero_grad()
    expected = plain.step(twin, x, y)
    expected.loss.backward()
    torch.testing.assert_close(out.x_prime, expected.x_prime, rtol=0, atol=1e-10)
    for mine, theirs in zip(fast.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-10)
    same(fast.model, twin)
    return out


def pair(name, **settings):
    net = norm_net().double()
    return Captured(makers()[name](), net, size_multiple=1, **settings), makers()[name](), copy.deepcopy(net)


@pytest.mark.parametrize("name", ["trades", "yopo", "free"])
def test_batches_may_grow_and_images_may_have_another_shape(on_gpu, name):
    fast, plain, twin = pair(name)
    outs = []
    for m, size in ((9, 8), (16, 8), (9, 8), (9, 10), (16, 10), (9, 10)):
        if name != "trades" and size != 8:
            break  # YOPO and Free are tried on growth alone
        x, y = batch(m, size=size, dtype=torch.float64, seed=m)
        outs.append(beside(fast, plain, twin, x, y))
    assert fast.reason is None
    kept = [out.x_prime.clone() for out in outs]
    fast.step(*batch(16, size=8, dtype=torch.float64))
    assert all(torch.equal(out.x_prime, value) for out, value in zip(outs, kept, strict=True))


def test_weights_that_were_replaced_and_layers_that_were_held_are_noticed(on_gpu):
    fast, plain, twin = pair("trades", on_message=lambda text: None)
    x, y = next(data(1))
    beside(fast, plain, twin, x, y)
    other = {name: torch.randn_like(t) if t.is_floating_point() else t.clone() for name, t in twin.state_dict().items()}
    other = {name: t.abs() + 0.5 if "var" in name else t for name, t in other.items()}
    for net in (fast.model, twin):
        net.load_state_dict({name: t.clone() for name, t in other.items()}, assign=True)  # other memory
    beside(fast, plain, twin, x, y)
    for net in (fast.model, twin):
        net[1].eval()  # a batch norm that is held
    beside(fast, plain, twin, x, y)
    for train in (fast.train, plain):
        train.budget = StepBudget(2, 1)
    out = beside(fast, plain, twin, x, y)
    assert out.steps.max() == 2
    assert "keep changing" in fast.reason  # three times within a few steps


def test_steady_steps_are_forgiven(on_gpu, monkeypatch):
    monkeypatch.setattr(module, "EARLY_STEPS", 3)
    fast, plain, twin = pair("trades")
    x, y = next(data(1))
    for eps in (0.05, 0.04, 0.03, 0.02, 0.01):
        for train in (fast.train, plain):
            train.objective.eps = eps
        for _ in range(4):
            beside(fast, plain, twin, x, y)
    assert fast.reason is None


def test_a_perturbation_that_is_loaded_anew_is_the_one_that_moves(on_gpu):
    fast, plain, twin = pair("free")
    x, y = next(data(1))
    start = fast.train.state_dict()
    for _ in range(3):
        beside(fast, plain, twin, x, y)
    for train in (fast.train, plain):
        train.load_state_dict(start)
    assert torch.equal(beside(fast, plain, twin, x, y).x_prime, x)
    assert not torch.equal(beside(fast, plain, twin, x, y).x_prime, x)


def test_another_robust_fraction_is_the_one_that_moves(on_gpu):
    fast, plain, twin = pair("trades")
    x, y = next(data(1))
    beside(fast, plain, twin, x, y)
    for train in (fast.train, plain):
        train.robust_fraction = bt.RobustFraction(gamma=0.5)
    for _ in range(3):
        beside(fast, plain, twin, x, y)
    assert float(fast.train.robust_fraction.value) == pytest.approx(float(plain.robust_fraction.value)) != 0


def test_values_are_looked_at_as_often_as_in_the_plain_step(on_gpu):
    fast, _, _ = pair("trades")
    fast.train.check_every = 2
    x, y = next(data(1))
    fast.step(x, y)
    fast.step(x * 255, y)  # step 2 is not looked at
    with pytest.raises(ValueError, match="outside"):
        fast.step(x * 255, y)
    with torch.no_grad():
        next(fast.model.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        fast.step(x, y)


def test_mistakes_are_said_before_anything_is_drawn(on_gpu):
    fast, _, _ = pair("trades")
    x, y = next(data(1))
    with pytest.raises(TypeError, match="floating-point images"):
        fast.step((x * 255).byte(), y)
    with (
        pytest.raises(ValueError, match="autocast is enabled around a captured step"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        fast.step(x, y)
    fast.step(x, y)
    with pytest.raises(ValueError, match=r"start has the shape \(1, 3, 8, 8\); it has to be x's, \(16, 3, 8, 8\)"):
        fast.step(x, y, start=x[:1])
    group = Captured(makers()["trades"](), norm_net().double(), attack_group=2)
    open_one = group.steps([(x, y), (x, y)])
    next(open_one)
    group.step(x, y)
    with pytest.raises(RuntimeError, match="finish a group before the next"):
        next(open_one)


def test_an_objective_whose_update_uses_its_attack_is_not_grouped_and_says_so(on_gpu):
    said = []
    fast = Captured(makers()["grad-align"](), norm_net().double(), attack_group=2, on_message=said.append)
    batches = list(data(2))
    assert len(list(fast.steps(batches))) == 2
    assert said == ["mini-batches are attacked one by one: this objective's attack and update share state"]


def test_a_group_without_a_gpu_is_attacked_at_once_and_the_line_does_not_say_otherwise():
    said = []
    fast = Captured(makers()["trades"](), norm_net().double(), attack_group=2, on_message=said.append)
    assert len(list(fast.steps(list(data(2))))) == 2
    assert said == ["CUDA graphs are off: there is no CUDA device"]


def test_without_a_gpu_it_is_the_plain_step_and_says_so_once():
    net = norm_net().double()
    fast = Captured(makers()["mart"](), net)
    with pytest.warns(UserWarning, match="CUDA graphs are off, steps run one by one: there is no CUDA device") as told:
        outs = [fast.step(x, y) for x, y in data(3)]
    assert len(told) == 1
    assert told[0].filename == __file__
    assert all(p.grad is not None for p in net.parameters())
    assert [len(out.category) for out in outs] == [16, 16, 9]


# ------------------------------------------------------------------------------------ parts of one's own


class OwnObjective(bt.TRADES):
    """Made of tensor operations: label smoothing in its clean term, and a margin to attack."""

    attack_loss = staticmethod(lambda logits, y, target: (logits.gather(1, y[:, None])[:, 0] - logits.amax(1)).neg())

    def loss(self, z, z_prime, y, touched=None, weight=None):
        smooth = -z.log_softmax(1).mean(1).mean()
        return super().loss(z, z_prime, y, touched) + 0.1 * smooth


class OwnBudget:
    """As many steps as the score's rank says."""

    uniform_steps = None

    def allocate(self, category, score=None, past=None):
        steps = score.argsort().argsort() % 5
        return bt.Allocated(steps, eps=torch.where(score > 0, 0.05, 0.02).to(score), weight=1 + score.abs())

    def step_sizes(self, category, steps, eps):
        return 1.7 * eps / steps.clamp_min(1).double()


def own_score(logits, y):
    return bt.signed_margin(logits, y) * 0.5


def own_separation(score, F_R):
    return torch.where(score < 0, 0, torch.where(score < score.mean(), 1, 2))


OWN = {
    "objective": lambda: bt.BulletTrain(OwnObjective(eps=0.05), budget=StepBudget(4, 2)),
    "budget": lambda: bt.BulletTrain(bt.TRADES(eps=0.05), budget=OwnBudget()),
    "budget, pgd-at": lambda: bt.BulletTrain(bt.PGDAT(eps=0.05), budget=OwnBudget()),
    "budget, mart": lambda: bt.BulletTrain(bt.MART(eps=0.05), budget=OwnBudget()),
    "any order": lambda: bt.BulletTrain(bt.MART(eps=0.05), budget=StepBudget(0, 3, 2, ordered=False)),
    "score": lambda: bt.BulletTrain(bt.TRADES(eps=0.05), budget=StepBudget(4, 2), score=own_score),
    "separation": lambda: bt.BulletTrain(bt.TRADES(eps=0.05), budget=StepBudget(4, 2), separation=own_separation),
    "oracle": lambda: bt.BulletTrain(
        bt.PGDAT(eps=0.05), budget=StepBudget(3, 1), separation=bt.OracleSeparation(steps=2)
    ),
    "early stop": lambda: bt.BulletTrain(bt.PGDAT(eps=0.1), budget=bt.EarlyStopBudget(5, extra_steps=2)),
    "stop at success": lambda: bt.BulletTrain(
        bt.PGDAT(eps=0.1, attack=Attack(stop_at_success=True)), budget=StepBudget(5, 2)
    ),
    "shuffled": lambda: bt.BulletTrain(bt.TRADES(eps=0.05), budget=bt.ShuffledBudget(StepBudget(4, 2), 0.05)),
    "attack in training mode": lambda: bt.BulletTrain(
        bt.TRADES(eps=0.05, attack_mode="train"), budget=StepBudget(3, 1)
    ),
    "gaussian": lambda: bt.BulletTrain(bt.PGDAT(eps=0.05), budget=bt.GaussianBudget(5)),
}


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("name", OWN)
def test_parts_of_ones_own_are_captured_like_the_built_in_ones(on_gpu, name, multiple):
    """Categories, steps, x' and gradients of the plain step, whatever sizes are rounded to."""
    net = norm_net().double() if multiple == 1 else tiny_net(channels=3, size=8)
    fast, plain, twin = Captured(OWN[name](), net, size_multiple=multiple), OWN[name](), copy.deepcopy(net)
    for x, y in data(5):
        noise = torch.Generator().manual_seed(3)
        start = x + 0.02 * torch.randn(x.shape, dtype=x.dtype, generator=noise).clamp(-1, 1)
        state = torch.get_rng_state()
        out = fast.step(x, y, start=start)
        torch.set_rng_state(state)
        twin.zero_grad()
        expected = plain.step(twin, x, y, start=start)
        expected.loss.backward()
        assert torch.equal(out.category, expected.category)
        assert torch.equal(out.steps, expected.steps)
        torch.testing.assert_close(out.x_prime, expected.x_prime, rtol=0, atol=1e-10)
        torch.testing.assert_close(out.loss, expected.loss.detach(), rtol=0, atol=1e-10)
        for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-10)
        same(net, twin)
    assert fast.reason is None
    assert len(fast.runner.graphs) > 3


def test_views_of_ones_own_are_captured(on_gpu):
    train = bt.BulletTrain(bt.AugMix(views=lambda x: (x * 0.9, x.flip(-1))), budget=StepBudget(1, 0))
    fast = Captured(train, norm_net().double())
    for x, y in data(3):
        assert torch.isfinite(fast.step(x, y).loss)
    assert fast.reason is None


# --------------------------------------------------------------------- what a graph cannot hold is noticed


class Counting(bt.TRADES):
    """Python counts, where nobody sees it."""

    calls = [0]  # noqa: RUF012

    def loss(self, z, z_prime, y, touched=None, weight=None):
        self.calls[0] += 1
        return super().loss(z, z_prime, y, touched) * (1 + self.calls[0] % 3)


class GrowingEps(bt.PGDAT):
    """An attribute that changes at every step."""

    def initial_perturbation(self, x):
        self.eps += 0.01
        return x.clone()


class Reading(bt.TRADES):
    """The host is asked what the device found."""

    def loss(self, z, z_prime, y, touched=None, weight=None):
        value = super().loss(z, z_prime, y, touched)
        return value * 2 if value.item() > 1.0 else value


def test_a_counter_in_python_is_noticed_at_the_first_replay(on_gpu):
    said = []
    fast = Captured(
        bt.BulletTrain(Counting(eps=0.05), budget=StepBudget(3, 1)), norm_net().double(), on_message=said.append
    )
    for x, y in data(3):
        before = Counting.calls[0]
        assert torch.isfinite(fast.step(x, y).loss)
        assert Counting.calls[0] > before  # it is Python that runs
    assert len(said) == 1
    assert "a replay of learn differs from eager" in said[0]


def test_an_eps_that_grows_is_the_one_that_is_used(on_gpu):
    said, budget = [], StepBudget.uniform(2, scale=1.0)
    net = norm_net().double()
    fast = Captured(bt.BulletTrain(GrowingEps(eps=0.05), budget=budget), net, on_message=said.append)
    plain, twin = bt.BulletTrain(GrowingEps(eps=0.05), budget=budget), copy.deepcopy(net)
    for x, y in data(6):
        out, expected = fast.step(x, y), plain.step(twin, x, y)
        torch.testing.assert_close(out.x_prime, expected.x_prime, rtol=0, atol=1e-10)
    assert len(said) == 1
    assert "keep changing" in said[0]


def test_what_reads_the_host_runs_without_graphs(on_gpu):
    said, net = [], norm_net().double()
    fast = Captured(bt.BulletTrain(Reading(eps=0.05), budget=StepBudget(3, 1)), net, on_message=said.append)
    plain, twin = bt.BulletTrain(Reading(eps=0.05), budget=StepBudget(3, 1)), copy.deepcopy(net)
    for x, y in data(3):
        start = x + 0.01
        out, expected = fast.step(x, y, start=start), plain.step(twin, x, y, start=start)
        torch.testing.assert_close(out.loss, expected.loss.detach(), rtol=0, atol=1e-10)
    assert len(said) == 1
    assert "reads back while a graph is captured" in said[0]


def test_a_replay_is_compared_once_more_on_every_checked_step(on_gpu, monkeypatch):
    """What begins to differ later is noticed then."""
    late = []

    class Later(bt.PGDAT):
        def loss(self, z, z_prime, y, touched=None, weight=None):
            return super().loss(z, z_prime, y, touched) * (2 if late else 1)

    said, (x, y) = [], next(data(1))
    train = bt.BulletTrain(Later(eps=0.05), budget=StepBudget.uniform(1), check_every=1)
    fast = Captured(train, norm_net().double(), on_message=said.append)
    before = [float(fast.step(x, y, start=x).loss) for _ in range(3)]
    late.append(True)
    losses = [float(fast.step(x, y, start=x).loss) for _ in range(8)]
    assert len(said) == 1
    assert losses[-1] == pytest.approx(2 * before[-1], rel=0.1)


def test_gradients_are_accumulated(on_gpu):
    net, train = norm_net().double(), makers()["trades"]()
    twin, plain = copy.deepcopy(net), makers()["trades"]()
    fast = Captured(train, net, size_multiple=1)
    for round_ in range(2):
        twin.zero_grad()
        for i, (x, y) in enumerate(data(3, (16,))):
            start = x + 0.01 * (round_ + 1)
            fast.step(x, y, start=start, accumulate=i > 0, scale=1 / 3)
            (plain.step(twin, x, y, start=start).loss / 3).backward()
        for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-10)
    assert fast.reason is None


def test_what_is_refused():
    train, net = makers()["trades"](), norm_net()
    with pytest.raises(TypeError, match="train is Sequential; give a BulletTrain"):
        Captured(net, train)
    with pytest.raises(TypeError, match=r"give an nn\.Module"):
        Captured(train, lambda x: x)
    with pytest.raises(ValueError, match="compiled already"):
        Captured(train, torch.compile(net))
    with pytest.raises(ValueError, match="size_multiple is 0"):
        Captured(train, net, size_multiple=0)
    with pytest.raises(ValueError, match="several devices"):
        Captured(train, nn.DataParallel(net))


def test_what_a_plain_step_refuses_is_refused_here_too():
    train, net = bt.BulletTrain(bt.PGDAT(eps=0.1), budget=StepBudget.uniform(1)), norm_net()
    x, y = torch.rand(6, 3, 8, 8), torch.arange(6) % 4
    with pytest.raises(ValueError, match="probabilities"):
        Captured(train, nn.Sequential(net, nn.Softmax(dim=1)), capture=False).step(x, y)
    with pytest.raises(ValueError, match="labels range from 1 to 4"):
        Captured(train, net, capture=False).step(x, y + 1)
