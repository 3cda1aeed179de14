"""The balls that attacks live in. A norm is three small methods; the loop that uses them is pgd.py's."""

from __future__ import annotations

from abc import ABC, abstractmethod

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
    """The norm of that name; a norm is itself."""
    if isinstance(norm, Norm):
        return norm
    if not isinstance(norm, str) or norm not in NORMS:
        raise ValueError(f"there is no norm {norm!r}; there are {', '.join(NORMS)}")
    return NORMS[norm]


def per_example(values: Tensor, like: Tensor) -> Tensor:
    """(m,) as (m, 1, …, 1), to go with ``like`` (m, …)."""
    return values.to(like.dtype).view(-1, *(1,) * (like.ndim - 1))


def length(t: Tensor) -> Tensor:
    """Euclidean length (m,) of each example of (m, …)."""
    lengths: Tensor = torch.linalg.vector_norm(t.flatten(1), dim=1)
    return lengths
