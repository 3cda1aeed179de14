"""Images that were normalised outside the network: the ball is of pixels all the same."""

import pytest
import torch
from torch import nn

import bullettrain as bt
from bullettrain.attacks import Normalized, pgd

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
    found = pgd(inside.network, x, y, norm=outside, bounds=outside.bounds, generator=seed(1), **about)
    assert torch.allclose(found * inside.std + inside.mean, expected, atol=1e-12)
    assert (found - x).abs().max() > 0.1


def test_a_step_is_that_of_the_network_with_the_normalisation_inside(both):
    inside, pixels, x, y = both
    outside, gradients, losses = Normalized(MEAN, STD), [], []
    start = pixels + 0.02 * torch.randn_like(pixels).clamp(-1, 1)
    for network, images, more in (
        (inside, pixels, {}),
        (inside.network, x, {"norm": outside, "bounds": outside.bounds}),
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
