"""Images that were normalised outside the network: the ball is of pixels all the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bullettrain as bt
from bullettrain import Normalized, baselines
from bullettrain.attacks import pgd
from bullettrain.attacks.norms import Linf
from conftest import batch, norm_net

MEAN, STD = (0.49, 0.48, 0.1), (0.2, 0.3, 0.5)


class Inside(nn.Module):
    """The network with the normalisation in it, which is the usual way."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        for name, value in (("mean", MEAN), ("std", STD)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64).view(3, 1, 1))

    def forward(self, x):
        return self.network((x - self.mean) / self.std)


@pytest.fixture
def both():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4)]
    inside = Inside(nn.Sequential(*layers).double())
    pixels, y = torch.rand(12, 3, 8, 8, dtype=torch.float64).round(decimals=1), torch.randint(0, 4, (12,))
    return inside, pixels, (pixels - inside.mean) / inside.std, y


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.1), ("l2", 0.8)])
@pytest.mark.parametrize("start", [None, "uniform"])
def test_the_attack_is_that_on_pixels(both, norm, eps, start):
    inside, pixels, x, y = both
    about = {"eps": eps, "steps": 5, "step_size": eps / 3, "random_start": start}
    seed = torch.Generator().manual_seed
    expected = pgd(inside, pixels, y, norm=norm, generator=seed(1), **about)
    outside = Normalized(MEAN, STD, norm)
    found = pgd(inside.network, x, y, norm=outside, generator=seed(1), **about)
    assert torch.allclose(found * inside.std + inside.mean, expected, atol=1e-12)
    assert (found - x).abs().max() > 0.1


def test_a_step_is_that_of_the_network_with_the_normalisation_inside(both):
    inside, pixels, x, y = both
    outside, gradients, losses = Normalized(MEAN, STD), [], []
    start = pixels + 0.02 * torch.randn_like(pixels).clamp(-1, 1)
    for network, images, more in (
        (inside, pixels, {}),
        (inside.network, x, {"norm": outside}),
    ):
        train = bt.BulletTrain(bt.TRADES(eps=0.1, **more), budget=bt.StepBudget(boundary=4, robust=2))
        at = start if not more else (start - inside.mean) / inside.std
        inside.zero_grad()
        inside.network[1].reset_running_stats()
        out = train.step(network, images, y, start=at)
        out.loss.backward()
        losses.append(out.loss.detach())
        gradients.append([p.grad.clone() for p in inside.parameters()])
    assert torch.allclose(*losses, atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(*gradients, strict=True))


def test_bounds_are_those_of_all_channels_and_nonsense_is_refused():
    low, high = Normalized(MEAN, STD).bounds
    assert (low, high) == (pytest.approx(-0.49 / 0.2), pytest.approx(0.51 / 0.2))
    for std in ((0.2, 0.3), (0.2, 0.3, 0.0)):
        with pytest.raises(ValueError, match="a mean and a positive std for each channel"):
            Normalized(MEAN, std)


# ------------------------------------------------------------------------------------- nothing leaves its ball


def tabular(features=20, m=64):
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    return network, 5 * torch.randn(m, features, dtype=torch.float64), torch.randint(0, 3, (m,))


def train_on(objective, network, x, y):
    return bt.BulletTrain(objective, budget=bt.StepBudget(boundary=4, robust=2)).step(network, x, y)


def test_bounds_that_differ_from_the_norms_pixels_are_refused():
    norm = Normalized(torch.zeros(20), torch.full((20,), 0.5))
    for bounds in (None, (0.0, 1.0), (torch.zeros(20), torch.ones(20))):
        with pytest.raises(ValueError, match=r"which makes them \(0, 2\); leave bounds out, and give Normalized"):
            bt.TRADES(eps=0.1, norm=norm, bounds=bounds)
    assert bt.TRADES(eps=0.1, norm=norm, bounds=norm.bounds).bounds == (0.0, 2.0)


def test_tabular_data_without_bounds_moves_by_eps_in_the_units_of_each_feature():
    network, x, y = tabular()
    norm = Normalized(torch.zeros(20), torch.full((20,), 0.5), pixels=None)
    out = train_on(bt.TRADES(eps=0.1, norm=norm), network, x, y)
    assert 0.19 < (out.x_prime - x).abs().max() <= 0.2 + 1e-12


def test_images_normalised_by_another_mean_and_std_are_refused(both):
    inside, pixels, _, y = both
    other = (pixels - 0.5) / 0.1
    with pytest.raises(ValueError, match=r"x ranges over .* in pixels, outside \[0, 1\].*bullettrain.Normalized"):
        train_on(bt.TRADES(eps=0.1, norm=Normalized(MEAN, STD)), inside.network, other, y)


def test_a_channel_is_looked_at_by_its_own_range(both):
    """Blue goes down to −0.2 normalised, red to −2.45: what is a pixel of the one is none of the other."""
    inside, _, x, y = both
    x[0, 2] = -1.0
    with pytest.raises(ValueError, match="in pixels, outside"):
        train_on(bt.TRADES(eps=0.1, norm=Normalized(MEAN, STD)), inside.network, x, y)


class Leaky(Linf):
    def project(self, x_adv, x, eps, bounds):
        return x_adv.clamp(*bounds)


@pytest.mark.parametrize("objective", [bt.PGDAT, bt.TRADES, bt.MART])
def test_a_perturbation_outside_its_ball_is_an_error_on_checked_steps(objective, both):
    inside, pixels, _, y = both
    with pytest.raises(RuntimeError, match=r"an attack went [\d.]+ times eps, out of its ball"):
        train_on(objective(eps=0.05, norm=Leaky()), inside, pixels, y)


HALF = [torch.bfloat16, torch.float16]


@given(st.sampled_from(HALF), st.sampled_from([1, 8, 32]), st.sampled_from(["linf", "l2"]), st.integers(0, 9))
def test_rounding_in_half_precision_is_no_mistake(dtype, eps, norm, seed):
    """x ± eps is rounded by more than eps is at 1/255; x and x' are valid all the same, also when normalised."""
    generator = torch.Generator().manual_seed(seed)
    pixels, y = torch.rand(8, 3, 6, 6, generator=generator), torch.arange(8) % 4
    pixels[0], pixels[1], pixels[:, :, 0] = 0, 1, 0
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    for x, ball in ((pixels, norm), ((pixels - mean) / std, Normalized(MEAN, STD, norm))):
        objective = bt.TRADES(eps=eps / 255, norm=ball)
        train = bt.BulletTrain(objective, budget=bt.StepBudget(4, 2, 1))
        with torch.no_grad(), pytest.raises(RuntimeError, match="out of its ball"):
            objective.check_perturbed(x.to(dtype), (x + (0.05 + 3 * eps / 255) / (1 if x is pixels else std)).to(dtype))
        with pytest.raises(ValueError, match="outside"):
            objective.check_inputs(1.5 * x.to(dtype))
        net = norm_net().to(dtype)
        train.step(net, x.to(dtype), y)


def test_checks_see_rows_that_cannot_move_and_images_with_a_graph(recwarn):
    class Half(bt.StepBudget):
        def allocate(self, category, score=None, past=None):
            steps = torch.arange(len(category)) % 2
            return bt.Allocated(steps, eps=0.1 * steps)

    x, y = torch.rand(6, 3, 6, 6, requires_grad=True), torch.arange(6) % 4
    bt.BulletTrain(bt.TRADES(eps=0.1), budget=Half(1, 0)).step(norm_net(), x, y)


@given(st.booleans(), st.sampled_from(["low", "high", "both"]), st.integers(1, 3))
def test_bounds_may_be_a_number_and_a_tensor(l2, tensor, seed):
    """What they do is what two numbers do."""
    x, y = batch(6, seed=seed)
    low, high = torch.full((3, 1, 1), 0.02), torch.full((3, 1, 1), 0.97, dtype=torch.float64)
    x = x.clamp(0.02, 0.97)
    mixed = (low if tensor != "high" else 0.02, high if tensor != "low" else 0.97)
    ball = {"norm": "l2", "eps": 0.8} if l2 else {"eps": 0.2}
    for make in (
        lambda bounds: bt.BulletTrain(bt.TRADES(bounds=bounds, **ball), budget=bt.StepBudget(2, 1, 1)),
        lambda bounds: baselines.fast(bt.PGDAT(bounds=bounds, **ball)),
        lambda bounds: baselines.one_step(baselines.Free(bounds=bounds, **ball)),
    ):
        found = []
        for bounds in (mixed, (0.02, 0.97)):
            torch.manual_seed(seed)
            train, net = make(bounds), norm_net()
            for _ in range(2):
                out = train.step(net, x, y)
                out.loss.backward()
            found.append(out.x_prime)
        torch.testing.assert_close(*found, rtol=0, atol=1e-6)


class Unclipped(Linf):
    def project(self, x_adv, x, eps, bounds):
        return x_adv.clamp(x - eps, x + eps)


def test_a_perturbation_outside_the_bounds_is_an_error_on_checked_steps(both):
    inside, pixels, _, y = both
    with pytest.raises(ValueError, match="x' ranges over"):
        train_on(bt.PGDAT(eps=0.05, norm=Unclipped()), inside, pixels, y)


@pytest.mark.parametrize("objective", [bt.PGDAT, bt.TRADES, bt.MART])
def test_eps_and_bounds_of_each_feature(objective):
    """As one feature at a time in units of its own: the same attack on rescaled data."""
    network, x, y = tabular()
    eps = torch.linspace(0.01, 1.0, 20, dtype=torch.float64)
    low, high = x.amin(0) - 0.3 * eps, x.amax(0) + 0.3 * eps
    torch.manual_seed(0)
    out = train_on(objective(eps=eps, bounds=(low, high)), network, x, y)
    moved = ((out.x_prime - x).abs() / eps).amax(dim=0)
    assert ((moved > 0.99) & (moved <= 1 + 1e-9)).all()
    assert (out.x_prime >= low).all()
    assert (out.x_prime <= high).all()

    rescaled = nn.Sequential(Rescale(eps), network)
    torch.manual_seed(0)
    start = None
    if objective is not bt.PGDAT:  # their noise has a size of its own, whatever eps is
        noise = 0.001 * torch.randn_like(x)
        start, out = (x + noise) / eps, None
        torch.manual_seed(0)
        out = train_on(objective(eps=eps, bounds=(low, high)), network, x, y)
    engine = bt.BulletTrain(
        objective(eps=1.0, bounds=(low / eps, high / eps)), budget=bt.StepBudget(boundary=4, robust=2)
    )
    torch.manual_seed(0)
    twin = engine.step(rescaled, x / eps, y, start=start)
    assert torch.allclose(twin.x_prime * eps, out.x_prime, atol=1e-9)


class Rescale(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return x * self.eps


def test_a_norm_says_itself():
    norm = Normalized((0.5,), (0.25,), pixels=None)
    assert repr(norm) == "Normalized(mean=(0.5), std=(0.25), norm=Linf, pixels=(-inf, inf))"
    assert "Normalized(" in repr(bt.TRADES(eps=0.1, norm=Normalized(MEAN, STD)))
