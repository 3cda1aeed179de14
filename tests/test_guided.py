"""GAT, NuAT and FGSM-PGI written out as their authors describe them, and the nuclear norm without a decomposition."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import bullettrain as bt
from bullettrain import BulletTrain, baselines
from bullettrain.attacks.losses import closed_form, gradient_at_logits
from bullettrain.attacks.norms import NORMS, Ball
from bullettrain.attacks.pgd import random_noise, starting_point
from bullettrain.baselines import FGSMPGI, GAT, NuAT
from bullettrain.baselines.nuat import polar_factor
from conftest import batch, norm_net, tiny_net
from test_baselines import gradients, same, small_batch

EPS = 0.1
KINDS = {"gat": GAT, "nuat": NuAT}


def term(name, z_prime, z):
    """What λ is the weight of, over the mini-batch."""
    if name == "gat":
        return (z_prime.softmax(1) - z.softmax(1)).square().sum(1).mean()
    return torch.linalg.matrix_norm(z_prime - z, "nuc") / len(z)


def attacked(net, x, start, value):
    """One step of ε along the sign, in eval mode, back into the ball and the pixels."""
    net.eval()
    at = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(net(at)), at)
    moved = at.detach() + EPS * gradient.sign()
    return torch.max(torch.min(moved, x + EPS), x - EPS).clamp(0, 1)


def literal(name, net, x, y, start, weight, guided):
    """x' and loss of one mini-batch."""
    with torch.no_grad():
        clean = net.eval()(x)
    x_prime = attacked(net, x, start, lambda z: F.cross_entropy(z, y) + guided * weight * term(name, z, clean))
    net.train()
    z, z_prime = net(x), net(x_prime)
    return x_prime, F.cross_entropy(z, y) + weight * term(name, z_prime, z)


@pytest.mark.parametrize("name", sorted(KINDS))
@pytest.mark.parametrize("make", [norm_net, tiny_net])
def test_guided_steps_are_the_literal_ones(name, make):
    """Every other attack has the term; λ is what the part of the training that is done makes it."""
    net = make(channels=3) if make is norm_net else make(channels=3, size=6)
    net = net.double()
    twin = copy.deepcopy(net)
    train = baselines.one_step(KINDS[name](eps=EPS, generator=torch.Generator().manual_seed(2)))
    generator, optimizers = torch.Generator().manual_seed(2), []
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.2) for n in (net, twin)]
    for step, done in enumerate((0.2, 0.3, 0.9, 1.0)):
        x, y = batch(12, dtype=torch.float64, seed=step)
        train.objective.progress(done)
        weight = 10.0 * (4 if done >= 0.86 else 1) if name == "gat" else 4.5 * min(1, done / 0.9)
        signs = torch.empty_like(x).bernoulli_(0.5, generator=generator) * 2 - 1
        start = (x + EPS / 2 * signs).clamp(0, 1)
        out = train.step(net, x, y)
        x_prime, loss = literal(name, twin, x, y, start, weight, step % 2)
        torch.testing.assert_close(out.x_prime, x_prime, rtol=0, atol=1e-12)
        torch.testing.assert_close(out.loss, loss, rtol=1e-8, atol=1e-8)
        out.loss.backward()
        loss.backward()
        same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()], 1e-7)
        same(net.buffers(), twin.buffers())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # so that differences do not add up
            for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
                mine.copy_(theirs)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_the_attacks_gradient_in_closed_form(name):
    objective, (logits, target) = KINDS[name](), torch.randn(2, 9, 5, dtype=torch.float64)
    y = torch.randint(5, (9,))
    loss = objective._attack_loss
    target = objective.target_of(target)
    found = closed_form(loss)(logits, y, target)
    torch.testing.assert_close(found, gradient_at_logits(loss, logits, y, target), rtol=0, atol=1e-9)
    objective.weights[1] = 0.0
    torch.testing.assert_close(closed_form(loss)(logits, y, target), logits.softmax(1) - F.one_hot(y, 5))


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 6), st.floats(0.02, 1.0), st.integers(0, 50), st.floats(1e-3, 1e3))
def test_the_polar_factor_gives_the_nuclear_norm(m, classes, least, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(m, m, dtype=torch.float64, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(classes, classes, dtype=torch.float64, generator=generator))
    rank = min(m, classes)
    values = torch.linspace(least, 1, rank, dtype=torch.float64)
    matrix = scale * u[:, :rank] * values @ v[:, :rank].T
    torch.testing.assert_close(polar_factor(matrix), u[:, :rank] @ v[:, :rank].T, rtol=0, atol=1e-9)
    single = polar_factor(matrix.float())
    torch.testing.assert_close(single, polar_factor(matrix).float(), rtol=0, atol=1e-4)
    assert not polar_factor(torch.zeros(m, classes)).any()


def test_gat_takes_other_steps_for_other_examples_and_nuat_does_not():
    net, (x, y) = tiny_net(), small_batch(24)
    train = BulletTrain(GAT(eps=EPS), budget=bt.StepBudget(2, 1))
    out = train.step(net, x, y)
    moved = out.steps > 0
    z, z_prime = net(x), net(out.x_prime)
    gap = (z_prime.softmax(1) - z.softmax(1)).square().sum(1)
    torch.testing.assert_close(out.loss, F.cross_entropy(z, y) + 10 * (gap * moved).mean())
    for budget in (bt.StepBudget(2, 1), bt.StepBudget.uniform(0), bt.EarlyStopBudget(2)):
        with pytest.raises(ValueError, match="the same number of steps for all"):
            BulletTrain(NuAT(eps=EPS), budget=budget)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_weights_of_the_examples_count(name):
    objective, y = KINDS[name](), torch.randint(5, (9,))
    z, z_prime = torch.randn(2, 9, 5, dtype=torch.float64)
    ones, weight = torch.ones(9, dtype=torch.float64), torch.rand(9, dtype=torch.float64)
    torch.testing.assert_close(objective.loss(z, z_prime, y, None, ones), objective.loss(z, z_prime, y))
    some = torch.tensor([0, 2, 3, 7])
    zeros = torch.zeros(9, dtype=torch.float64).index_fill(0, some, 1.0)
    kept = objective.loss(z, z.index_copy(0, some, z_prime[some]), y, some, weight)
    clean = (weight * F.cross_entropy(z, y, reduction="none")).mean()
    whole = (
        objective.loss(z, z_prime, y, None, weight * zeros)
        - (weight * zeros * F.cross_entropy(z, y, reduction="none")).mean()
    )
    torch.testing.assert_close(kept - clean, whole)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_turn_and_weight_are_state(name):
    net, (x, y) = tiny_net(), small_batch()
    first, second = (baselines.one_step(KINDS[name](eps=EPS)) for _ in range(2))
    first.objective.progress(0.45)
    first.step(net, x, y)
    second.load_state_dict(first.state_dict())
    start = first.objective.initial_perturbation(x)
    mine, theirs = (train.step(net, x, y, start=start) for train in (first, second))
    assert torch.equal(mine.x_prime, theirs.x_prime)
    assert torch.equal(mine.loss, theirs.loss)
    assert first.state_dict()["objective"] == second.state_dict()["objective"]


# ------------------------------------------------------------------------------------------------ FGSM-PGI


@pytest.mark.parametrize("classes", [2, 4])
def test_fgsm_pgi_is_the_literal_one(classes):
    net = norm_net(classes).double()
    twin = copy.deepcopy(net)
    x, y = batch(12, classes=classes, dtype=torch.float64)
    start = (x + 0.05 * torch.randn_like(x)).clamp(0, 1)
    out = baselines.one_step(FGSMPGI(eps=EPS)).step(net, x, y, start=start)

    soft = torch.full((12, classes), 0.4 / (classes - 1), dtype=torch.float64).scatter(1, y[:, None], 0.6)
    x_prime = attacked(twin, x, start, lambda z: -(soft * z.log_softmax(1)).sum(1).mean())
    twin.train()
    before, after = twin(start), twin(x_prime)
    loss = -(soft * after.log_softmax(1)).sum(1).mean() + 10 * F.mse_loss(after, before)
    torch.testing.assert_close(out.x_prime, x_prime, rtol=0, atol=1e-12)
    torch.testing.assert_close(out.loss, loss)
    same(gradients(net, out.loss), gradients(twin, loss))
    same(net.buffers(), twin.buffers())
    assert out.z is None  # what the loss compares with are no clean logits
    found = FGSMPGI().attack_loss
    logits = torch.randn(12, classes, dtype=torch.float64)
    same([found.gradient(logits, y, None)], [gradient_at_logits(found, logits, y, None)])


def test_fgsm_pgi_draws_a_start_where_it_is_given_none():
    net, (x, y) = tiny_net(), small_batch()
    drawn = baselines.one_step(FGSMPGI(eps=EPS, generator=torch.Generator().manual_seed(5))).step(net, x, y)
    signs = torch.empty_like(x).bernoulli_(0.5, generator=torch.Generator().manual_seed(5)) * 2 - 1
    given_ = baselines.one_step(FGSMPGI(eps=EPS)).step(net, x, y, start=(x + EPS * signs).clamp(0, 1))
    assert torch.equal(drawn.loss, given_.loss)


def test_what_fgsm_pgi_refuses():
    for budget in (bt.StepBudget(1, 0), bt.StepBudget.uniform(0)):
        with pytest.raises(ValueError, match="the same number of steps for all"):
            BulletTrain(FGSMPGI(eps=EPS), budget=budget)
    with pytest.raises(ValueError, match="of L∞"):
        FGSMPGI(norm="l2", eps=0.5)
    with pytest.raises(TypeError, match="FGSMPGI takes no label_smoothing; leave it out"):
        FGSMPGI(label_smoothing=0.1)


# ----------------------------------------------------------------------------------------- a Bernoulli start


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_bernoulli_start_lies_on_the_ball(norm):
    x = torch.full((4, 3, 5, 5), 0.5)
    ball = Ball(NORMS[norm], 0.2, (0.0, 1.0))
    noise = random_noise("bernoulli", ball, x, 0.5)
    torch.testing.assert_close(NORMS[norm].distance(noise, 0.2), torch.full((4,), 0.5))
    assert len(noise.abs().flatten(1).unique().mul(1e5).round().unique()) == 1
    assert 0.2 < float((noise > 0).float().mean()) < 0.8
    assert float(starting_point("bernoulli", 2 * x, noise, ball).max()) == 1.0
