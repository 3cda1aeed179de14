"""Noise: gaussian, shot, impulse, speckle. Images are uint8 (n, 32, 32, 3), in and out."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from bullettrain.corruptions.chance import Chance
from bullettrain.corruptions.filters import divide, to_bytes, unit


def gaussian_noise(images: Tensor, std: float, chance: Chance) -> Tensor:
    """x + N(0, std)."""
    return to_bytes(chance.normal(*images.shape[1:], std=std).add_(unit(images)))


def speckle_noise(images: Tensor, std: float, chance: Chance) -> Tensor:
    """x + x·N(0, std)."""
    x = unit(images)
    return to_bytes(chance.normal(*images.shape[1:], std=std).mul_(x).add_(x))


def impulse_noise(images: Tensor, share: float, chance: Chance) -> Tensor:
    """Each channel value is, with probability ``share``, replaced: by 0 or by 255, as often."""
    u = chance.uniform(*images.shape[1:])
    return images.masked_fill(u < share, 255).masked_fill_(u < share / 2, 0)


def shot_noise(images: Tensor, photons: float, chance: Chance) -> Tensor:
    """Poisson(x·photons) / photons."""
    sums, starts = (t.to(images.device) for t in _poisson(photons))
    level = images.long()
    # The distribution functions of the 256 levels stand one after the other, each raised by its level, in one
    # sorted row: looking up level + u finds how many photons a uniform u stands for.
    count = torch.searchsorted(sums, chance.uniform(*images.shape[1:]).add_(level), right=True).sub_(starts[level])
    return to_bytes(divide(count.double(), photons))


@functools.cache
def _poisson(photons: float) -> tuple[Tensor, Tensor]:
    """Distribution functions of Poisson(v/255·photons), v = 0 … 255, v added, float64 (256·K,); where each starts."""
    levels = torch.arange(256, dtype=torch.float64)
    rate = (levels / 255 * photons)[:, None]
    counts = torch.arange(math.ceil(photons + 12 * math.sqrt(photons) + 12), dtype=torch.float64)
    mass = (torch.xlogy(counts, rate) - rate - torch.lgamma(counts + 1)).exp()
    # The last one is 1 whatever the rounding: no uniform falls through to the next level.
    sums = mass.cumsum(1).clamp_(max=1)
    sums[:, -1] = 1
    return (sums + levels[:, None]).flatten(), torch.arange(256) * len(counts)
