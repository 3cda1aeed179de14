"""The balls that attacks live in. A norm is three small methods; the loop that uses them is pgd.py's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Norm(ABC):
    """A threat model: where noise starts, which way is steepest, and what is inside."""

    @abstractmethod
    def noise(self, x: Tensor, eps: float, generator: torch.Generator | None) -> Tensor:
        """A uniform draw from the ball of radius ``eps``, shaped as ``x`` (m, …)."""

    @abstractmethod
    def direction(self, gradient: Tensor) -> Tensor:
        """Steepest ascent of length 1 for a gradient (m, …)."""

    @abstractmethod
    def project(self, x_adv: Tensor, x: Tensor, eps: float, bounds: tuple[float, float]) -> Tensor:
        """``x_adv`` brought into the ball around ``x`` and into ``bounds``, both (m, …)."""


class Linf(Norm):
    """Every pixel may move by ``eps``."""

    def noise(self, x: Tensor, eps: float, generator: torch.Generator | None) -> Tensor:
        """Each pixel uniform in [−eps, eps]."""
        return torch.empty_like(x).uniform_(-eps, eps, generator=generator)

    def direction(self, gradient: Tensor) -> Tensor:
        """The sign."""
        return gradient.sign()

    def project(self, x_adv: Tensor, x: Tensor, eps: float, bounds: tuple[float, float]) -> Tensor:
        """One clamp to the box that is the ball and the bounds together."""
        low, high = (x - eps).clamp_min(bounds[0]), (x + eps).clamp_max(bounds[1])
        return x_adv.clamp(low, high)


class L2(Norm):
    """The image may move by ``eps`` in Euclidean distance."""

    def noise(self, x: Tensor, eps: float, generator: torch.Generator | None) -> Tensor:
        """A random direction, at a radius that makes the draw uniform in the ball: eps·U^(1/d)."""
        direction = torch.empty_like(x).normal_(generator=generator)
        radius = torch.empty(len(x), dtype=x.dtype, device=x.device).uniform_(generator=generator)
        dimensions = x[0].numel()
        return self.direction(direction) * per_example(eps * radius.pow(1 / dimensions), x)

    def direction(self, gradient: Tensor) -> Tensor:
        """The unit vector; a gradient of 0 stays 0."""
        return gradient / per_example(length(gradient).clamp_min(1e-12), gradient)

    def project(self, x_adv: Tensor, x: Tensor, eps: float, bounds: tuple[float, float]) -> Tensor:
        """Shorten to the radius, then clamp; with ``x`` inside the bounds clamping only shortens further."""
        delta = x_adv - x
        delta = delta * per_example((eps / length(delta).clamp_min(1e-12)).clamp_max(1.0), x)
        return (x + delta).clamp(*bounds)


NORMS: dict[str, Norm] = {"linf": Linf(), "l2": L2()}
USUAL_EPS = {"linf": 0.031, "l2": 0.5}
"""Radii where none is given: the paper's, and what is usual on CIFAR-10."""


def find_norm(norm: str | Norm) -> Norm:
    """The norm of that name, in any case of its letters; a norm is itself."""
    if isinstance(norm, Norm):
        return norm
    if not isinstance(norm, str) or norm.lower() not in NORMS:
        raise ValueError(f"there is no norm {norm!r}; there are {', '.join(NORMS)}")
    return NORMS[norm.lower()]


class Normalized(Norm):
    """The ball of another norm in pixels, for images that a loader has normalised: x = (pixel − mean) / std.

    ``eps`` and step sizes are of pixels, and x' are images whose pixels are valid; :attr:`bounds` is what an objective
    takes as its own.

    Args:
        mean, std: of each channel, (C,).
        norm: "linf" or "l2", in pixels.
        pixels: their valid range.
    """

    def __init__(
        self,
        mean: Sequence[float] | Tensor,
        std: Sequence[float] | Tensor,
        norm: str | Norm = "linf",
        *,
        pixels: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.mean, self.std = (torch.as_tensor(value, dtype=torch.float64).flatten() for value in (mean, std))
        if self.mean.shape != self.std.shape or not bool((self.std > 0).all()):
            raise ValueError("give a mean and a positive std for each channel")
        self.norm, self.pixels = find_norm(norm), pixels
        self._ready: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    @property
    def bounds(self) -> tuple[float, float]:
        """What normalised images may range over, whatever their channel."""
        ends = [(value - self.mean) / self.std for value in self.pixels]
        return float(ends[0].min()), float(ends[1].max())

    def noise(self, x: Tensor, eps: float, generator: torch.Generator | None) -> Tensor:
        """A uniform draw from the ball of pixels."""
        return self.norm.noise(x, eps, generator) / self._of(x)[1]

    def direction(self, gradient: Tensor) -> Tensor:
        """Steepest ascent of length 1 in pixels."""
        std = self._of(gradient)[1]
        return self.norm.direction(gradient / std) / std

    def project(self, x_adv: Tensor, x: Tensor, eps: float, bounds: tuple[float, float]) -> Tensor:
        """Into the ball of pixels around ``x``, and to valid pixels."""
        mean, std = self._of(x)
        inside = self.norm.project(x_adv * std + mean, x * std + mean, eps, self.pixels)
        return (inside - mean) / std

    def _of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std, to go with ``x`` (m, C, …); they stay on its device."""
        key = x.device, x.dtype
        if key not in self._ready:
            shape = (-1, *(1,) * (x.ndim - 2))
            self._ready[key] = self.mean.to(x).view(shape), self.std.to(x).view(shape)
        return self._ready[key]


def per_example(values: Tensor, like: Tensor) -> Tensor:
    """(m,) as (m, 1, …, 1), to go with ``like`` (m, …)."""
    return values.to(like.dtype).view(-1, *(1,) * (like.ndim - 1))


def length(t: Tensor) -> Tensor:
    """Euclidean length (m,) of each example of (m, …)."""
    lengths: Tensor = torch.linalg.vector_norm(t.flatten(1), dim=1)
    return lengths
