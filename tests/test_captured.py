"""`Captured` in a loop of one's own: the gradients of the plain step, by recorded and replayed pieces, or plainly."""

import copy

import pytest
import torch
from torch import nn

import bullettrain as bt
from bullettrain import Captured, StepBudget, baselines
from bullettrain.engine import captured as module
from bullettrain.models import WideResNet
from conftest import batch, norm_net
from emulated import Emulated


@pytest.fixture
def on_gpu(monkeypatch):
    """As if there were one: pieces are recorded once, and replayed."""
    monkeypatch.setattr(module, "_on_gpu", lambda x: True)
    monkeypatch.setattr(module, "Graphs", lambda state, say: Emulated(state))


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
        "grad-align": lambda: baselines.grad_align(seeded(baselines.GradAlign, eps=0.05)),
        "free": lambda: baselines.free(baselines.Free(eps=0.05)),
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
    fast = Captured(trains[1], nets[1], bucket=1)
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
        fast = Captured(train, net, group=k, bucket=1, say=lambda text: None)
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
    with pytest.raises(ValueError, match="3 mini-batches were given at once; Captured has group=1"):
        Captured(makers()["trades"](), start, say=print).steps(batches)


def test_gradients_are_set_anew_and_those_of_frozen_and_unused_weights_are_none(on_gpu):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.unused = norm_net(), nn.Linear(3, 3)

        def forward(self, x):
            return self.body(x)

    net = Net().double()
    net.body[0].weight.requires_grad_(False)
    fast = Captured(makers()["trades"](), net, bucket=1)
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
    fast = Captured(train, net, bucket=1, say=said.append)
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
    assert "change again and again" in said[0]
    assert "change again and again" in fast.reason


def test_without_a_gpu_it_is_the_plain_step_and_says_so_once():
    net = norm_net().double()
    fast = Captured(makers()["mart"](), net)
    with pytest.warns(UserWarning, match="CUDA graphs are off, steps run one by one: there is no CUDA device") as told:
        outs = [fast.step(x, y) for x, y in data(3)]
    assert len(told) == 1
    assert all(p.grad is not None for p in net.parameters())
    assert [len(out.category) for out in outs] == [16, 16, 9]


class Own(bt.PGDAT):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: bt.BulletTrain(Own(eps=0.05), budget=StepBudget.uniform(2)), "Own may do something in Python"),
        (lambda: bt.BulletTrain(Own(eps=0.05), budget=StepBudget(2, 1)), "Own may corrupt in a way of its own"),
        (
            lambda: bt.BulletTrain(bt.AugMix(views=lambda x: (x, x)), budget=StepBudget.uniform(1)),
            "function of its own",
        ),
        (
            lambda: bt.BulletTrain(bt.PGDAT(eps=0.05), budget=StepBudget(2, 1), separation=bt.OracleSeparation()),
            "looks at the network",
        ),
    ],
)
def test_what_cannot_be_captured_runs_plainly(on_gpu, make, reason):
    net, said = norm_net().double(), []
    fast = Captured(make(), net, say=said.append)
    for x, y in data(2):
        assert torch.isfinite(fast.step(x, y).loss)
    assert all(p.grad is not None for p in net.parameters())
    assert len(said) == 1
    assert reason in said[0]


def test_what_is_refused():
    train, net = makers()["trades"](), norm_net()
    with pytest.raises(TypeError, match="train is Sequential; give a BulletTrain"):
        Captured(net, train)
    with pytest.raises(TypeError, match=r"give an nn\.Module"):
        Captured(train, lambda x: x)
    with pytest.raises(ValueError, match="compiled already"):
        Captured(train, torch.compile(net))
    with pytest.raises(ValueError, match="bucket is 0"):
        Captured(train, net, bucket=0)
