"""Random numbers that depend only on (seed, corruption, severity, image index), the same on every device.

They come from SplitMix64 (Steele, Lea, Flood 2014), whose n-th number can be computed directly. Each image has its own
section of the stream, so batch sizes and devices do not change its numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bullettrain.data.base import derive_seed

NUMBERS_PER_IMAGE = 1 << 20
"""Random numbers reserved for each image; the most that a corruption uses is 3,600."""

_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


class Chance:
    """The random numbers of images ``first`` to ``first + n - 1`` of one corruption at one severity."""

    def __init__(self, seed: int, name: str, severity: int, *, first: int, n: int, device: torch.device) -> None:
        self.n, self.device = n, device
        key = derive_seed(seed, "corruption", name, severity)
        self._starts = torch.arange(first, first + n, device=device) * NUMBERS_PER_IMAGE + 1
        self._starts = self._starts * _signed(_GAMMA) + key
        self._taken = 0

    def bits(self, *shape: int) -> Tensor:
        """Return 64 random bits each, as int64 (n, *shape)."""
        count = math.prod(shape)
        steps = torch.arange(self._taken, self._taken + count, device=self.device) * _signed(_GAMMA)
        self._taken += count
        z = self._starts[:, None] + steps  # int64 wraps around, as SplitMix64 requires
        for shift, factor in _MIX:
            z ^= _shifted(z, shift)
            z *= _signed(factor)
        z ^= _shifted(z, 31)
        return z.view(self.n, *shape)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return uniform numbers in [low, high), float64 (n, *shape)."""
        unit = _shifted(self.bits(*shape), 11).double() * 2.0**-53
        return unit if (low, high) == (0.0, 1.0) else unit * (high - low) + low

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """Return normal numbers, float64 (n, *shape), by the Box–Muller transform of the two halves of 64 bits."""
        bits = self.bits(*shape)
        radius = ((_shifted(bits, 32).double() + 0.5) * 2.0**-32).log_().mul_(-2).sqrt_()
        angle = (bits & 0xFFFFFFFF).double() * (2 * math.pi * 2.0**-32)
        return radius.mul_(angle.cos_()).mul_(std).add_(mean)

    def below(self, limit: int | Tensor, *shape: int) -> Tensor:
        """Return integers from 0 to limit - 1, int64 (n, *shape); a tensor ``limit`` is broadcast to that shape."""
        return (self.uniform(*shape) * limit).long()


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shift right with zeros; the shift of int64 repeats the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    """Return the int64 with the same 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits
