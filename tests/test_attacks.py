import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bullettrain as bt
import reference
from bullettrain.attacks import NORMS, frozen, pgd
from conftest import assert_same, batch, norm_net, snapshot, tiny_net


@given(st.lists(st.integers(0, 4), min_size=1, max_size=7), st.sampled_from(["ce", "kl"]), st.integers(0, 5))
def test_ragged_pgd_is_the_literal_one(counts, loss, seed):
    net = tiny_net(seed=seed)
    x, y = batch(len(counts), channels=1, size=4, dtype=torch.float64, seed=seed)
    start = x + 0.01 * torch.randn(x.shape, dtype=torch.float64)
    sizes = torch.linspace(0.01, 0.05, len(counts), dtype=torch.float64)
    ours = pgd(
        net,
        x,
        y,
        eps=0.06,
        steps=torch.tensor(counts),
        step_size=sizes,
        loss=loss,
        target=net(x).softmax(1) if loss == "kl" else None,
        start=start,
    )
    for i, count in enumerate(counts):
        literal = reference.attack(net, x[i], int(y[i]), loss, count, float(sizes[i]), start[i], 0.06)
        assert torch.allclose(ours[i], literal, atol=1e-12, rtol=0)
        if count == 0:
            assert torch.equal(ours[i], x[i])
    assert not ours.requires_grad


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_the_batch_really_shrinks(counts):
    net, seen = tiny_net(), []
    net.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    x, y = batch(len(counts), channels=1, size=4, dtype=torch.float64)
    pgd(net, x, y, eps=0.1, steps=torch.tensor(counts), step_size=0.02)
    assert seen == [sum(c > t for c in counts) for t in range(max(counts))]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("random_start", ["uniform", "normal", None])
@given(eps=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_result_is_in_the_ball_and_in_bounds(norm, random_start, eps, seed):
    net = tiny_net(seed=seed)
    x, y = batch(5, channels=1, size=4, dtype=torch.float64, seed=seed)
    x = 3 * x - 1
    adv = pgd(net, x, y, eps=eps, steps=3, step_size=eps, norm=norm, random_start=random_start, bounds=(-1, 2))
    delta = (adv - x).flatten(1)
    size = delta.abs().amax(1) if norm == "linf" else delta.norm(dim=1)
    assert (size <= eps * (1 + 1e-9)).all()
    assert adv.min() >= -1
    assert adv.max() <= 2


@pytest.mark.parametrize("loss", ["ce", "kl", "margin"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_attack_climbs(loss, norm):
    net = tiny_net()
    x, y = batch(32, channels=1, size=4, dtype=torch.float64)
    eps = 0.1 if norm == "linf" else 0.4
    target = net(x).softmax(1).detach()
    adv = pgd(net, x, y, eps=eps, steps=10, step_size=eps / 4, loss=loss, norm=norm, target=target)
    z, z_adv = net(x), net(adv)
    if loss == "ce":
        assert (F.cross_entropy(z_adv, y, reduction="none") > F.cross_entropy(z, y, reduction="none")).all()
    elif loss == "kl":
        assert (F.kl_div(z_adv.log_softmax(1), target, reduction="none").sum(1) > 0).all()
    else:
        onehot = F.one_hot(y, 4).bool()
        margins = [(v.masked_fill(onehot, -1e9).amax(1) - v[onehot]) for v in (z, z_adv)]
        assert (margins[1] > margins[0]).all()


def test_l2_step_is_the_written_out_one():
    net = tiny_net()
    x, y = batch(6, channels=1, size=4, dtype=torch.float64)
    adv = pgd(net, x, y, eps=0.5, steps=2, step_size=0.2, norm="l2", random_start=None)
    for i in range(6):
        at = x[i : i + 1].clone()
        for _ in range(2):
            at.requires_grad_(True)
            (g,) = torch.autograd.grad(F.cross_entropy(net(at), y[i : i + 1]), at)
            delta = at.detach() + 0.2 * g / np.sqrt(float((g**2).sum())) - x[i : i + 1]
            size = np.sqrt(float((delta**2).sum()))
            at = (x[i : i + 1] + delta * min(1.0, 0.5 / size)).clamp(0, 1)
        assert torch.allclose(adv[i], at[0], atol=1e-12)


def test_uniform_start_fills_the_ball():
    x = torch.zeros(20000, 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    box = NORMS["linf"].noise(x, 0.5, generator)
    assert abs(float(box.mean())) < 0.01
    assert float(box.var()) == pytest.approx(1 / 12, rel=0.03)
    ball = NORMS["l2"].noise(x, 0.5, generator).norm(dim=1)
    assert ball.max() <= 0.5
    assert float((ball < 0.25).double().mean()) == pytest.approx(1 / 8, abs=0.01)  # (r/R)^d, d = 3


def test_noise_does_not_depend_on_the_others_steps():
    net = tiny_net()
    x, y = batch(6, channels=1, size=4, dtype=torch.float64)

    def attack(counts):
        generator = torch.Generator().manual_seed(7)
        return pgd(net, x, y, eps=0.1, steps=torch.tensor(counts), step_size=0.02, generator=generator)

    everyone, some = attack([3] * 6), attack([0, 3, 0, 0, 3, 1])
    assert torch.allclose(everyone[[1, 4]], some[[1, 4]], atol=1e-12)
    assert torch.equal(some[[0, 2, 3]], x[[0, 2, 3]])


def odd_state():
    """A network in an unusual state: mixed modes, one held parameter, gradients present."""
    net = norm_net()
    x, y = batch()
    F.cross_entropy(net(x), y).backward()
    net[1].eval()
    net[0].weight.requires_grad_(False)
    return net, x, y


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_network_is_left_as_it_was(mode):
    net, x, y = odd_state()
    before = snapshot(net)
    pgd(net, x, y, eps=0.1, steps=2, step_size=0.05, mode=mode)
    assert_same(before, snapshot(net))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_network_is_left_as_it_was_when_the_attack_raises(mode):
    net, x, y = odd_state()
    before = snapshot(net)

    def explode(logits, labels, target):
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        pgd(net, x, y, eps=0.1, steps=2, step_size=0.05, mode=mode, loss=explode)
    assert_same(before, snapshot(net))


def test_modes_differ_with_batch_norm():
    net = norm_net()
    x, y = batch()
    modes = []
    net[1].register_forward_hook(lambda module, args, out: modes.append(module.training))
    for mode in ("eval", "train"):
        pgd(net, x, y, eps=0.1, steps=1, step_size=0.05, mode=mode)
    assert modes == [False, True]


def test_channels_last_is_kept():
    net = norm_net().to(memory_format=torch.channels_last)
    x, y = batch()
    x = x.contiguous(memory_format=torch.channels_last)
    seen = []
    net.register_forward_hook(
        lambda module, args, out: seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )
    adv = pgd(net, x, y, eps=0.1, steps=torch.arange(16) % 3, step_size=0.05, random_start=None)
    plain = pgd(net, x.contiguous(), y, eps=0.1, steps=torch.arange(16) % 3, step_size=0.05, random_start=None)
    assert seen[:2] == [True, True]
    assert adv.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(adv, plain, atol=1e-6)


def test_float16_gradients_do_not_vanish():
    net = nn.Sequential(nn.Flatten(), nn.Linear(108, 32), nn.Linear(32, 4))
    with torch.no_grad():
        net[1].weight.fill_(2e-4)
        net[2].weight.copy_(torch.tensor([[1e-6], [-1e-6], [2e-6], [-2e-6]]).expand(4, 32))
    # The gradient of a pixel is at most 32·2e-6·2e-4, less than half of float16's smallest number.
    x, y = torch.full((4, 3, 6, 6), 0.5), torch.arange(4)
    with torch.autocast("cpu", torch.float16):
        adv = pgd(net, x, y, eps=0.1, steps=1, step_size=0.05, random_start=None)
    assert ((adv - x).abs() > 0.04).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": 0.0}, "eps is 0"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"step_size": -1.0}, "step_size is -1"),
        ({"step_size": float("nan")}, "step_size is nan"),
        ({"steps": -1}, "it has to be at least 0"),
        ({"steps": 1.5}, "whole number"),
        ({"steps": torch.tensor([1.0] * 16)}, "whole number"),
        ({"steps": torch.tensor([1, -2] * 8)}, "it has to be at least 0"),
        ({"steps": torch.ones(3, dtype=torch.int64)}, r"need \(16,\)"),
        ({"norm": "l7"}, "linf, l2"),
        ({"loss": "hinge"}, "ce, kl, margin"),
        ({"loss": "kl"}, "target="),
        ({"random_start": "gauss"}, "there are uniform, normal"),
        ({"start": torch.zeros(3)}, "start has the shape"),
        ({"bounds": (1, 0)}, "low < high"),
        ({"eps": torch.full((5, 1, 1), 0.1)}, r"eps has the shape \(5, 1, 1\); it has to broadcast to one example"),
        ({"eps": torch.full((3, 1, 1), 0.1), "norm": "l2"}, "eps is a tensor, which is for L∞"),
        ({"eps": torch.zeros(3, 1, 1)}, "not above 0"),
        ({"bounds": torch.rand(2, 3)}, r"bounds are float32 of shape \(2, 3\); give two numbers"),
        ({"mode": "test"}, "mode is 'test'; there are eval, train"),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(change, message):
    net, x, y = odd_state()
    before = snapshot(net)
    with pytest.raises((ValueError, TypeError), match=message):
        pgd(net, x, y, **{"eps": 0.1, "steps": 1, "step_size": 0.05, **change})
    assert_same(before, snapshot(net))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.rand(4, 3, 6, 6) * 3, torch.zeros(4, dtype=torch.int64), r"outside \[0, 1\]"),
        (torch.zeros(4, 3, 6, 6, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), "x is uint8"),
        (torch.rand(0, 3, 6, 6), torch.zeros(0, dtype=torch.int64), "the batch is empty"),
        (torch.rand(4, 3, 6, 6), torch.zeros(4), "labels are float32"),
    ],
)
def test_bad_batches_are_refused(x, y, message):
    with pytest.raises((ValueError, TypeError), match=message):
        pgd(norm_net(), x, y, eps=0.1, steps=torch.ones(len(x), dtype=torch.int64), step_size=0.05)


def test_a_function_is_no_network():
    with pytest.raises(TypeError, match=r"the model is <lambda>; give an nn\.Module"):
        pgd(lambda x: x, *batch(), eps=0.1, steps=1, step_size=0.05)


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_without_bounds_the_ball_alone_holds_an_attack(norm):
    net, (x, y) = norm_net(), batch()
    wanted = pgd(net, x, y, eps=0.5, steps=3, step_size=0.4, norm=norm.lower(), random_start=None, bounds=(-9, 9))
    found = pgd(net, x, y, eps=0.5, steps=3, step_size=0.4, norm=norm, random_start=None, bounds=None)
    assert torch.equal(found, wanted)
    assert found.min() < 0


def test_frozen_keeps_autocast_from_caching_casts_without_gradient():
    net = nn.Linear(3, 2)
    x = torch.rand(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        with frozen(net), torch.no_grad():
            net(x)
        net(x).float().sum().backward()
    assert net.weight.grad is not None


@pytest.fixture
def alone():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.parallel.DistributedDataParallel])
@pytest.mark.parametrize("attack_mode", ["eval", "train"])
def test_the_module_inside_a_wrapper_says_the_mode(alone, wrap, attack_mode):
    """``net.eval()`` for an evaluation leaves the wrapper in training mode, and ``net.train()`` one in eval mode."""

    def modes(objective, wrap, change):
        net, seen = norm_net(), []
        model = wrap(net)
        change(model, net)
        net[1].register_forward_hook(lambda module, args, out: seen.append(module.training))
        train = bt.BulletTrain(objective(eps=0.05, attack_mode=attack_mode), budget=bt.StepBudget.uniform(1))
        train.step(model, *batch())
        return seen

    def evaluated(model, net):
        net.eval()

    def frozen_norm(model, net):
        model.eval()
        net.train()
        net[1].eval()

    for objective in (bt.PGDAT, bt.TRADES):
        for change in (evaluated, frozen_norm):
            assert modes(objective, wrap, change) == modes(objective, lambda net: net, change)
