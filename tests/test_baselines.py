"""The baselines as their authors describe them: the update rule written out literally, passes counted by hooks."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import bullettrain as bt
import plain
import reference
from bullettrain import BulletTrain, baselines
from bullettrain.attacks import pgd
from bullettrain.baselines import FGSMPGI, GAT, FirstLayer, Free, GradAlign, NuAT
from bullettrain.engine import captured
from conftest import assert_same, batch, norm_net, snapshot, tiny_net
from emulated import EmulatedRunner
from grouped import Fast

OBJECTIVES = {"pgd": bt.PGDAT, "trades": bt.TRADES, "mart": bt.MART}
EPS = 0.1


def makers(eps=EPS):
    return {
        "fast": lambda: baselines.fast(bt.PGDAT(eps=eps)),
        "fast trades": lambda: baselines.fast(bt.TRADES(eps=eps)),
        "fast mart": lambda: baselines.fast(bt.MART(eps=eps)),
        "fast-3": lambda: baselines.fast(bt.TRADES(eps=eps), steps=3),
        "n-fgsm": lambda: baselines.n_fgsm(bt.PGDAT(eps=eps)),
        "yopo": lambda: baselines.yopo(bt.TRADES(eps=eps)),
        "grad-align": lambda: baselines.one_step(GradAlign(eps=eps)),
        "free": lambda: baselines.one_step(Free(eps=eps)),
        "gat": lambda: baselines.one_step(GAT(eps=eps)),
        "nuat": lambda: baselines.one_step(NuAT(eps=eps)),
        "fgsm-pgi": lambda: baselines.one_step(FGSMPGI(eps=eps)),
    }


def small_batch(m=8, seed=1, classes=4):
    return batch(m, classes=classes, channels=1, size=4, dtype=torch.float64, seed=seed)


def gradients(net, loss):
    return torch.autograd.grad(loss, list(net.parameters()))


def same(ours, theirs, tolerance=1e-10):
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------- FAST


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_fast_is_its_objective_with_a_uniform_start_and_large_steps_bit_for_bit(name, steps):
    net = norm_net()
    twin = copy.deepcopy(net)
    x, y = batch()
    beta = {} if name == "pgd" else {"beta": 6.0}
    kind = OBJECTIVES[name](eps=EPS, generator=torch.Generator().manual_seed(3), **beta)
    out = baselines.fast(kind, steps=steps).step(net, x, y)

    noise = torch.empty_like(x).uniform_(-EPS, EPS, generator=torch.Generator().manual_seed(3))
    alpha = 1.25 * EPS if steps == 1 else 1.7 * EPS / steps
    written = {"pgd": plain.pgd_at, "trades": plain.trades, "mart": plain.mart}[name]
    x_prime, loss = written(twin, x, y, (x + noise).clamp(0, 1), steps, alpha, EPS, 6.0)
    assert torch.equal(out.x_prime, x_prime)
    assert torch.equal(out.loss, loss)
    out.loss.backward()
    loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), twin.buffers(), strict=True))


def test_the_objective_that_was_given_stays_as_it_was():
    given = bt.TRADES(eps=EPS)
    train = baselines.fast(given)
    assert (given.start, train.objective.start) == ("normal", "clipped")
    assert (train.objective.beta, train.objective.eps) == (given.beta, EPS)


@pytest.mark.parametrize("make", [baselines.fast, baselines.n_fgsm, baselines.yopo])
@pytest.mark.parametrize("objective", [bt.TRADES, bt.AugMix(), GradAlign(), Free()])
def test_what_has_no_attack_to_change_is_refused(make, objective):
    with pytest.raises(TypeError, match="give PGDAT, TRADES or MART"):
        make(objective)


# ----------------------------------------------------------------------------------------------- N-FGSM


@settings(max_examples=20)
@given(st.integers(1, 6), st.floats(0.01, 0.6), st.integers(0, 5))
def test_n_fgsm_is_noise_and_one_step_without_a_projection(m, eps, seed):
    net = tiny_net(seed=seed)
    x, y = small_batch(m, seed)
    objective = bt.PGDAT(eps=eps, generator=torch.Generator().manual_seed(seed))
    out = baselines.n_fgsm(objective).step(net, x, y)
    noise = torch.empty_like(x).uniform_(-2 * eps, 2 * eps, generator=torch.Generator().manual_seed(seed))
    losses = []
    for image, label, eta, ours in zip(x, y.tolist(), noise, out.x_prime, strict=True):
        at = (image + eta).clamp(0, 1).requires_grad_()
        (gradient,) = torch.autograd.grad(-net(at[None])[0].log_softmax(0)[label], at)
        x_prime = (at + eps * gradient.sign()).clamp(0, 1).detach()
        torch.testing.assert_close(ours, x_prime, rtol=0, atol=1e-12)
        losses.append(-net(x_prime[None])[0].log_softmax(0)[label])
    same(gradients(net, out.loss), gradients(net, sum(losses) / m))
    assert float((out.x_prime - x).abs().max()) <= 3 * eps + 1e-12


def test_n_fgsm_leaves_the_ball_and_fast_does_not():
    net, (x, y) = tiny_net(), small_batch()
    x = 0.4 + 0.2 * x
    moved = {name: makers()[name]().step(net, x, y).x_prime - x for name in ("n-fgsm", "fast")}
    assert float(moved["n-fgsm"].abs().max()) > 2 * EPS
    assert float(moved["fast"].abs().max()) <= EPS + 1e-12


# ------------------------------------------------------------------------------------------------- YOPO


class Squared(nn.Module):
    def forward(self, x):
        return x.square()


def bent_net(seed=0):
    """What comes before the first layer is not linear, so that the gradient through it changes from move to move."""
    return nn.Sequential(Squared(), *tiny_net(seed=seed))


def literal_yopo(net, x, label, start, passes, updates, alpha, eps):
    """One example (C, H, W). The first layer by hand: a = W·x² + b."""
    first, rest = net[2], net[3:]
    target = net(x[None])[0].softmax(0).detach()
    at = start
    for _ in range(passes):
        a = (first.weight @ at.flatten().square() + first.bias).detach().requires_grad_()
        log_p = rest(a[None])[0].log_softmax(0)
        (p,) = torch.autograd.grad((target * (target.log() - log_p)).sum(), a)
        for _ in range(updates):
            gradient = (2 * at.flatten() * (first.weight.T @ p)).view(x.shape).detach()
            moved = torch.max(torch.min(at + alpha * gradient.sign(), x + eps), x - eps)
            at = moved.clamp(0, 1)
    return at.detach()


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))
def test_yopo_is_the_literal_one(passes, updates, m, seed):
    net = bent_net(seed)
    x, y = small_batch(m, seed)
    start = x + 0.001 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))
    train = baselines.yopo(bt.TRADES(eps=EPS, beta=6.0), passes=passes, updates=updates)
    before = snapshot(net)
    out = train.step(net, x, y, start=start)
    assert_same(before, snapshot(net))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())

    alpha = 2.25 * EPS / (passes * updates)
    losses = []
    for image, label, at, ours in zip(x, y.tolist(), start, out.x_prime, strict=True):
        x_prime = literal_yopo(net, image, label, at, passes, updates, alpha, EPS)
        torch.testing.assert_close(ours, x_prime, rtol=0, atol=1e-12)
        losses.append(reference.example_loss("trades", net(image[None])[0], net(x_prime[None])[0], label, 6.0))
    same(gradients(net, out.loss), gradients(net, sum(losses) / m))


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_yopo_with_one_move_a_pass_is_pgd(name):
    net = norm_net().double()
    twin = copy.deepcopy(net)
    x, y = batch(dtype=torch.float64)
    ours, theirs = (kind(eps=EPS) for kind in (OBJECTIVES[name],) * 2)
    start = x + 0.01
    yopo = baselines.yopo(ours, passes=3, updates=1).step(net, x, y, start=start)
    plainly = BulletTrain(theirs, budget=bt.StepBudget.uniform(3)).step(twin, x, y, start=start)
    torch.testing.assert_close(yopo.x_prime, plainly.x_prime, rtol=0, atol=1e-12)


def test_the_papers_yopo_moves_by_its_authors_step():
    assert baselines.yopo_budget(0.031, 2, 5).boundary_step(0.031) == 0.007
    assert baselines.yopo_budget(0.1, 2, 5).boundary_step(0.1) == pytest.approx(2.25 * 0.1 / 10)


def test_yopo_only_attacks_those_that_have_steps():
    net, (x, y) = norm_net(), batch()
    steps = torch.arange(len(x)) % 3
    adv = pgd(net, x, y, eps=EPS, steps=steps, step_size=0.02, ascent=FirstLayer(3))
    assert torch.equal(adv[steps == 0], x[steps == 0])
    alone = pgd(
        net, x[steps == 2], y[steps == 2], eps=EPS, steps=2, step_size=0.02, start=x[steps == 2], ascent=FirstLayer(3)
    )
    assert (adv[steps == 2] - x[steps == 2]).abs().max() > 0
    assert alone.shape == adv[steps == 2].shape


def test_the_first_layer_can_be_named():
    net, (x, y) = norm_net(), batch()
    settings = {"eps": EPS, "steps": 2, "step_size": 0.02, "random_start": None}
    found = pgd(net, x, y, ascent=FirstLayer(2), **settings)
    assert torch.equal(found, pgd(net, x, y, ascent=FirstLayer(2, layer="0"), **settings))
    assert not torch.equal(found, pgd(net, x, y, ascent=FirstLayer(2, layer="2"), **settings))  # after the ReLU
    with pytest.raises(AttributeError, match="nothing"):
        pgd(net, x, y, ascent=FirstLayer(2, layer="nothing"), **settings)


def test_a_network_without_a_first_layer():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.scale * x.flatten(1)[:, :4]

    x, y = batch()
    with pytest.raises(ValueError, match="found no convolution or linear layer"):
        pgd(Bare(), x, y, eps=EPS, steps=1, step_size=0.1, ascent=FirstLayer(2))
    with pytest.raises(ValueError, match="updates is 0; it has to be at least 1"):
        FirstLayer(0)


# --------------------------------------------------------------------------------------------- GradAlign


@settings(max_examples=20)
@given(st.integers(1, 5), st.floats(0.05, 3.0), st.integers(0, 5))
def test_grad_align_is_the_literal_one(m, weight, seed):
    net = tiny_net(seed=seed)
    x, y = small_batch(m, seed)
    eta = torch.empty_like(x).uniform_(-EPS, EPS, generator=torch.Generator().manual_seed(seed))
    train = baselines.one_step(GradAlign(eps=EPS, beta=weight))
    out = train.step(net, x, y, start=x + eta)
    losses = []
    for image, label, noise, ours in zip(x, y.tolist(), eta, out.x_prime, strict=True):

        def gradient(at, label=label):
            at = at.clone().requires_grad_()
            return torch.autograd.grad(-net(at[None])[0].log_softmax(0)[label], at, create_graph=True)[0].flatten()

        here, there = gradient(image).detach(), gradient(image + noise)
        x_prime = (image + EPS * here.sign().view(image.shape)).clamp(0, 1)
        torch.testing.assert_close(ours, x_prime, rtol=0, atol=1e-12)
        cosine = here @ there / (here.norm() * there.norm())
        losses.append(-net(x_prime[None])[0].log_softmax(0)[label] + weight * (1 - cosine))
    loss = sum(losses) / m
    torch.testing.assert_close(out.loss, loss, rtol=1e-10, atol=1e-10)
    same(gradients(net, out.loss), gradients(net, loss), 1e-9)


def test_grad_align_draws_its_own_noise():
    net, (x, y) = tiny_net(), small_batch()
    draw = torch.empty_like(x).uniform_(-EPS, EPS, generator=torch.Generator().manual_seed(5))
    drawn = baselines.one_step(GradAlign(eps=EPS, generator=torch.Generator().manual_seed(5))).step(net, x, y)
    handed = baselines.one_step(GradAlign(eps=EPS)).step(net, x, y, start=x + draw)
    assert torch.equal(drawn.loss, handed.loss)


def test_a_network_without_gradients_adds_no_penalty():
    net, (x, y) = tiny_net(), small_batch()
    nn.init.zeros_(net[1].weight)  # the input has no effect: cos is not defined
    objective = GradAlign(eps=EPS)
    out = baselines.one_step(objective).step(net, x, y)
    torch.testing.assert_close(out.loss, F.cross_entropy(net(x), y))
    assert all(torch.isfinite(gradient).all() for gradient in gradients(net, out.loss))


def test_tiny_gradients_still_have_a_direction():
    net, (x, y) = tiny_net(), small_batch()
    with torch.no_grad():
        net[3].weight.mul_(1e-120)
    out = baselines.one_step(GradAlign(eps=EPS, beta=100.0)).step(net, x, y)
    assert out.loss > F.cross_entropy(net(out.x_prime), y) + 1e-3


def test_grad_align_wants_the_same_steps_for_everyone():
    net, (x, y) = tiny_net(), small_batch()
    with pytest.raises(ValueError, match="start has the shape"):
        baselines.one_step(GradAlign(eps=EPS)).step(net, x, y, start=x[:3])
    for budget in (bt.StepBudget(1, 0), bt.StepBudget.uniform(0)):
        with pytest.raises(ValueError, match="the same number of steps for all"):
            BulletTrain(GradAlign(eps=EPS), budget=budget).step(net, x, y)


# ------------------------------------------------------------------------------------------------- Free


def literal_free(net, batches, replays, eps, lr):
    """Weights after training, and δ: the loop as its authors describe it."""
    delta = torch.zeros(max(len(x) for x, _ in batches), *batches[0][0].shape[1:], dtype=batches[0][0].dtype)
    net.train()
    for x, y in batches:
        for _ in range(replays):
            noise = delta[: len(x)].clone().requires_grad_()
            loss = F.cross_entropy(net((x + noise).clamp(0, 1)), y)
            *weights, gradient = torch.autograd.grad(loss, [*net.parameters(), noise])
            with torch.no_grad():
                for parameter, g in zip(net.parameters(), weights, strict=True):
                    parameter -= lr * g
            delta[: len(x)] = (delta[: len(x)] + eps * gradient.sign()).clamp(-eps, eps)
    return delta


def train_free(train, net, batches, replays, lr):
    for x, y in batches:
        for _ in range(replays):
            train.step(net, x, y).loss.backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= lr * parameter.grad
                    parameter.grad = None


@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 3, 8), (1, 1), (3, 8)])
def test_free_is_the_literal_loop_bit_for_bit(sizes):
    net = norm_net() if 1 not in sizes else nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
    twin = copy.deepcopy(net)
    batches = [batch(m, seed=seed) for seed, m in enumerate(sizes)]
    train = baselines.one_step(Free(eps=EPS))
    train_free(train, net, batches, 3, 0.1)
    delta = literal_free(twin, batches, 3, EPS, 0.1)
    assert torch.equal(train.objective.delta, delta)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), twin.state_dict().values(), strict=True))
    assert float(delta.abs().max()) == pytest.approx(EPS)


def test_frees_first_step_is_clean_and_the_next_is_not():
    net, (x, y) = norm_net(), batch()
    train = baselines.one_step(Free(eps=EPS))
    first = train.step(net, x, y)
    assert torch.equal(first.x_prime, x)
    again = train.step(net, x, y)  # no backward in between: nothing has moved
    assert torch.equal(again.x_prime, x)
    again.loss.backward()
    assert not torch.equal(train.step(net, x, y).x_prime, x)


def test_frees_perturbation_is_state():
    net = norm_net()
    batches = [batch(m, seed=m) for m in (8, 5, 8)]
    straight, whole = copy.deepcopy(net), baselines.one_step(Free(eps=EPS))
    train_free(whole, straight, batches, 3, 0.1)
    first = baselines.one_step(Free(eps=EPS))
    train_free(first, net, batches[:2], 3, 0.1)
    state = copy.deepcopy(first.state_dict())
    train_free(first, copy.deepcopy(net), batches[2:], 1, 0.1)  # what is saved does not change any more
    second = baselines.one_step(Free(eps=EPS))
    second.load_state_dict(state)
    train_free(second, net, batches[2:], 3, 0.1)
    assert all(
        torch.equal(a, b) for a, b in zip(net.state_dict().values(), straight.state_dict().values(), strict=True)
    )
    with pytest.raises(ValueError, match="carries delta, which PGDAT does not"):
        BulletTrain(bt.PGDAT(), budget=bt.StepBudget.uniform(1)).load_state_dict(state)


def test_free_starts_afresh_on_other_images_and_survives_an_overflow():
    train = baselines.one_step(Free(eps=EPS))
    train.step(norm_net(), *batch()).loss.backward()
    train.step(norm_net(), *batch(size=8)).loss.backward()
    assert train.objective.delta.shape == (16, 3, 8, 8)
    (train.step(norm_net(), *batch(size=8)).loss * math.inf).backward()
    assert torch.isfinite(train.objective.delta).all()


def test_free_in_l2_stays_in_its_ball():
    train = baselines.one_step(Free(eps=0.5, norm="l2"))
    net, (x, y) = norm_net(), batch()
    for _ in range(4):
        train.step(net, x, y).loss.backward()
    lengths = train.objective.delta.flatten(1).norm(dim=1)
    assert 0.1 < float(lengths.max()) <= 0.5 + 1e-6


def test_free_is_captured_with_a_smaller_last_batch(monkeypatch):
    """Replays set no attributes: pieces that are captured or checked later take no sizes of another batch."""
    monkeypatch.setattr(captured, "_on_gpu", lambda x: True)
    monkeypatch.setattr(captured, "CudaGraphRunner", EmulatedRunner)
    net = norm_net().double()
    twin, batches = copy.deepcopy(net), [batch(m, seed=m, dtype=torch.float64) for m in (9, 9, 4, 9, 4, 4) * 4]
    train = BulletTrain(Free(eps=EPS), budget=baselines.ONE_STEP, check_every=5)
    fast = bt.Captured(train, net, size_multiple=1)
    for x, y in batches:
        fast.step(x, y)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
    delta = literal_free(twin, batches, 1, EPS, 0.1)
    assert fast.reason is None
    torch.testing.assert_close(train.objective.delta, delta, rtol=0, atol=1e-12)


def test_free_is_one_step_for_everyone():
    for budget in (bt.StepBudget.uniform(2), bt.StepBudget(1, 0)):
        with pytest.raises(ValueError, match="one step for all examples"):
            BulletTrain(Free(eps=EPS), budget=budget).step(norm_net(), *batch())


# -------------------------------------------------------------------------------------- what they cost

# Forwards and backwards an example, of the whole network; the last: forwards of the first layer.
COUNTS = {
    "fast": (2, 2, 2),
    "fast trades": (4, 3, 4),
    "fast mart": (3, 3, 3),
    "fast-3": (6, 5, 6),
    "n-fgsm": (2, 2, 2),
    "yopo": (5, 4, 5 + 2 * 5),
    "grad-align": (3, 2 + 2, 3),
    "free": (1, 1, 1),
    "gat": (4, 3, 4),
    "nuat": (4, 3, 4),
    "fgsm-pgi": (3, 3, 3),
}


MORE = {
    **{f"fast-{n}": lambda n=n: baselines.fast(bt.TRADES(eps=EPS), steps=n) for n in (2, 4, 5)},
    "yopo-3-2": lambda: baselines.yopo(bt.TRADES(eps=EPS), passes=3, updates=2),
}
COUNTS |= {f"fast-{n}": (n + 3, n + 2, n + 3) for n in (2, 4, 5)} | {"yopo-3-2": (6, 5, 6 + 3 * 2)}


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_passes_counted_by_hooks(name):
    net, (x, y) = tiny_net(), small_batch(8)
    seen = {"forward": 0, "backward": 0, "first": 0}

    def backward(gradient):
        seen["backward"] += len(gradient)

    def forward(module, args, out):
        seen["forward"] += len(out)
        if out.requires_grad:
            out.register_hook(backward)

    net.register_forward_hook(forward)
    net[1].register_forward_hook(lambda module, args, out: seen.update(first=seen["first"] + len(out)))
    train = (makers() | MORE)[name]()
    out = train.step(net, x, y)
    out.loss.backward()
    forwards, backwards, first = COUNTS[name]
    assert seen == {"forward": 8 * forwards, "backward": 8 * backwards, "first": 8 * first}


class Operations(TorchDispatchMode):
    """Multiplications and additions of every matrix product, forward or backward, by torch's own formulas."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.count += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


@pytest.mark.parametrize("name", sorted(set(COUNTS) - {"nuat"}))  # whose nuclear norm is made of products, too
def test_work_is_what_the_operations_come_to(name):
    """Equal layers, so that a pass is so many products; an update needs no gradient at its input, Free's does."""
    layers, width, m = 5, 16, 8
    net = nn.Sequential(nn.Flatten(), *(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))
    net = net[:-1].double()
    x, y = small_batch(m, classes=width)
    train = (makers() | MORE)[name]()
    with Operations() as counter:
        out = train.step(net, x, y)
        out.loss.backward()
    one_layer = 2 * m * width * width
    joined = name.startswith(("fast ", "fast-", "yopo", "gat", "fgsm-pgi"))  # the update has two forwards
    skipped = 2 if joined else {"free": 0}.get(name, 1)
    assert counter.count / one_layer == pytest.approx(layers * out.work.per_example - skipped)


PASSES = {"fast": 5, "fast trades": 9, "fast mart": 8, "n-fgsm": 5, "grad-align": 11, "free": 3}
PASSES |= {"gat": 9, "nuat": 9, "fgsm-pgi": 8}
PASSES |= {f"fast-{n}": 2 * n + 7 for n in (2, 3, 4, 5)}


@pytest.mark.parametrize("name", sorted(PASSES))
def test_passes_an_example(name):
    assert (makers() | MORE)[name]().step(norm_net(), *batch()).work.per_example == PASSES[name]


# --------------------------------------------------------------------------------------- any of them


@pytest.mark.parametrize("name", sorted(makers()))
@pytest.mark.parametrize(("m", "classes"), [(1, 4), (1, 2), (5, 2)])
def test_small_batches_and_two_classes(name, m, classes):
    net = tiny_net(classes)
    out = makers()[name]().step(net, *small_batch(m, classes=classes))
    assert torch.isfinite(out.loss)
    assert all(torch.isfinite(gradient).all() for gradient in gradients(net, out.loss))


@pytest.mark.parametrize("name", sorted(makers()))
def test_the_network_is_left_as_it_was(name):
    net, (x, y) = tiny_net(), small_batch()
    before = snapshot(net)
    out = makers()[name]().step(net, x, y)
    assert_same(before, snapshot(net))
    assert not out.x_prime.requires_grad
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.parametrize("name", sorted(makers()))
def test_bf16_autocast_gives_every_gradient(name):
    net, (x, y) = norm_net(), batch()
    train = makers()[name]()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            out = train.step(net, x, y)
        out.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


@pytest.mark.parametrize("name", ["yopo", "grad-align", "free"])
def test_a_compiled_network_gives_the_same(name):
    """YOPO's hooks and GradAlign's second gradient are of the plain network inside."""
    x, y = batch(dtype=torch.float64)
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = norm_net().double()
        model = torch.compile(net, backend="aot_eager") if compiled else net
        out = makers()[name]().step(model, x, y, start=x + 0.01)
        out.loss.backward()
        results.append([out.loss.detach(), out.x_prime, *(p.grad for p in net.parameters())])
    same(*results)


@pytest.mark.parametrize("name", ["fast trades", "fast mart", "fast-3", "n-fgsm", "yopo", "gat", "nuat", "fgsm-pgi"])
def test_fast_phases_take_the_plain_steps(name):
    """Two steps as they are captured on a GPU against two plain ones."""
    torch.manual_seed(0)
    net = norm_net().double()
    twin = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, twin)]
    train, group = makers()[name](), makers()[name]()
    engine = Fast(group, twin, optimizers[1])
    for seed in (1, 2):
        x, y = batch(dtype=torch.float64, seed=seed)
        start = train.objective.start_from(x, train.objective.noise(x))
        out = train.step(net, x, y, start=start)
        out.loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        theirs = engine.train_on([(x, y, start)])[0]
        torch.testing.assert_close(out.x_prime, theirs.x_prime, rtol=0, atol=1e-12)
        assert out.work.total == theirs.work.total
    same(net.parameters(), twin.parameters(), 1e-10)
