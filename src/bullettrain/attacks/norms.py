"""The balls that attacks live in. A norm is four small methods; the loop that uses them is in pgd.py."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bullettrain.brief import brief
from bullettrain.validation import check_bounds, check_positive, check_range

Limit = float | Tensor
"""A number, or a tensor that broadcasts to one example: (C, 1, 1) for images, (D,) for tabular data."""

Bounds = tuple[Limit, Limit]
"""The valid range of inputs, (low, high)."""

AUTO: Literal["auto"] = "auto"
"""The bounds that follow from the norm: those of :class:`Normalized`, else (0, 1)."""


class Norm(ABC):
    """Where noise starts, which way is steepest, what is inside, and how far away something is."""

    @abstractmethod
    def noise(self, x: Tensor, eps: Limit, generator: torch.Generator | None) -> Tensor:
        """A uniform draw from the ball of radius ``eps``, shaped as ``x`` (m, …)."""

    @abstractmethod
    def direction(self, gradient: Tensor) -> Tensor:
        """Steepest ascent of length 1 for a gradient (m, …)."""

    @abstractmethod
    def project(self, x_adv: Tensor, x: Tensor, eps: Limit, bounds: Bounds) -> Tensor:
        """``x_adv`` brought into the ball around ``x`` and into ``bounds``, both (m, …)."""

    @abstractmethod
    def distance(self, delta: Tensor, eps: Limit) -> Tensor:
        """Length (m,) of perturbations (m, …), in units of ``eps``: above 1 is outside the ball."""

    def pixels_of(self, x: Tensor) -> Tensor:
        """``x`` (m, …) in the units that ``bounds`` are in."""
        return x

    def clip(self, x: Tensor, bounds: Bounds) -> Tensor:
        """``x`` (m, …) brought into ``bounds``."""
        return x.clamp(*bounds)  # type: ignore[arg-type]


class Linf(Norm):
    """Every value may move by ``eps``."""

    def noise(self, x: Tensor, eps: Limit, generator: torch.Generator | None) -> Tensor:
        """Each value uniform in [−eps, eps]."""
        if isinstance(eps, Tensor):
            return torch.empty_like(x).uniform_(-1, 1, generator=generator) * eps
        return torch.empty_like(x).uniform_(-eps, eps, generator=generator)

    def direction(self, gradient: Tensor) -> Tensor:
        """The sign."""
        return gradient.sign()

    def project(self, x_adv: Tensor, x: Tensor, eps: Limit, bounds: Bounds) -> Tensor:
        """One clamp to the box that is the ball and the bounds together."""
        low, high = (x - eps).clamp(min=bounds[0]), (x + eps).clamp(max=bounds[1])
        return x_adv.clamp(low, high)

    def distance(self, delta: Tensor, eps: Limit) -> Tensor:
        """The largest value, in units of eps."""
        return (delta.abs() / eps).flatten(1).amax(dim=1)


class L2(Norm):
    """The example may move by ``eps`` in Euclidean distance."""

    def noise(self, x: Tensor, eps: Limit, generator: torch.Generator | None) -> Tensor:
        """A random direction, at a radius that makes the draw uniform in the ball: eps·U^(1/d)."""
        direction = torch.empty_like(x).normal_(generator=generator)
        radius = torch.empty(len(x), dtype=x.dtype, device=x.device).uniform_(generator=generator)
        dimensions = x[0].numel()
        return self.direction(direction) * per_example(eps * radius.pow(1 / dimensions), x)

    def direction(self, gradient: Tensor) -> Tensor:
        """The unit vector; a gradient of 0 stays 0."""
        return gradient / per_example(length(gradient).clamp_min(1e-12), gradient)

    def project(self, x_adv: Tensor, x: Tensor, eps: Limit, bounds: Bounds) -> Tensor:
        """Shorten to the radius, then clamp; with ``x`` inside the bounds clamping only shortens further."""
        delta = x_adv - x
        radius = eps.flatten(0) if isinstance(eps, Tensor) else eps  # (m,) where each example has its own
        delta = delta * per_example((radius / length(delta).clamp_min(1e-12)).clamp_max(1.0), x)
        return self.clip(x + delta, bounds)

    def distance(self, delta: Tensor, eps: Limit) -> Tensor:
        """Euclidean length, in units of eps."""
        return length(delta) / (eps.flatten(0) if isinstance(eps, Tensor) else eps)


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
    """The ball of another norm in pixels, for inputs that a loader has normalised: x = (pixel − mean) / std.

    ``eps`` and step sizes are in pixels, and x' are inputs whose pixels are valid. An objective takes its bounds from
    the norm.

    Args:
        mean: (C,) of each channel; (D,) for tabular data.
        std: likewise.
        norm: "linf" or "l2", in pixels.
        pixels: their valid range; None: any are.
    """

    def __init__(
        self,
        mean: Sequence[float] | Tensor,
        std: Sequence[float] | Tensor,
        norm: str | Norm = "linf",
        *,
        pixels: tuple[float, float] | None = (0.0, 1.0),
    ) -> None:
        self.mean, self.std = (torch.as_tensor(value, dtype=torch.float64).flatten() for value in (mean, std))
        if self.mean.shape != self.std.shape or not bool((self.std > 0).all()):
            raise ValueError("give a mean and a positive std for each channel")
        self.norm, self.pixels = find_norm(norm), check_bounds(pixels)
        self._ready: dict[tuple[torch.device, torch.dtype, int], tuple[Tensor, Tensor]] = {}

    def __repr__(self) -> str:
        mean, std = (brief(tuple(value.tolist())) for value in (self.mean, self.std))
        return f"Normalized(mean={mean}, std={std}, norm={brief(self.norm)}, pixels={brief(self.pixels)})"

    @property
    def bounds(self) -> tuple[float, float]:
        """What normalised inputs may range over, whatever their channel."""
        ends = [(value - self.mean) / self.std for value in self.pixels]
        return float(ends[0].min()), float(ends[1].max())

    def noise(self, x: Tensor, eps: Limit, generator: torch.Generator | None) -> Tensor:
        """A uniform draw from the ball of pixels."""
        return self.norm.noise(x, eps, generator) / self._of(x)[1]

    def direction(self, gradient: Tensor) -> Tensor:
        """Steepest ascent of length 1 in pixels."""
        std = self._of(gradient)[1]
        return self.norm.direction(gradient / std) / std

    def project(self, x_adv: Tensor, x: Tensor, eps: Limit, bounds: Bounds) -> Tensor:
        """Into the ball of pixels around ``x``, and to valid pixels."""
        mean, std = self._of(x)
        inside = self.norm.project(x_adv * std + mean, x * std + mean, eps, self.pixels)
        return (inside - mean) / std

    def distance(self, delta: Tensor, eps: Limit) -> Tensor:
        """In pixels, in units of eps."""
        return self.norm.distance(delta * self._of(delta)[1], eps)

    def pixels_of(self, x: Tensor) -> Tensor:
        """x·std + mean."""
        mean, std = self._of(x)
        return x * std + mean

    def clip(self, x: Tensor, bounds: Bounds) -> Tensor:
        """To valid pixels."""
        mean, std = self._of(x)
        return (self.norm.clip(x * std + mean, self.pixels) - mean) / std

    def _of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std, to go with ``x`` (m, C, …); they stay on its device."""
        key = x.device, x.dtype, x.ndim
        if key not in self._ready:
            if x.ndim < 2 or x.shape[1] != len(self.mean):
                raise ValueError(
                    f"x has the shape {tuple(x.shape)}; the norm has mean and std of {len(self.mean)} channels"
                )
            shape = (-1, *(1,) * (x.ndim - 2))
            self._ready[key] = self.mean.to(x).view(shape), self.std.to(x).view(shape)
        return self._ready[key]


@dataclass(frozen=True)
class Ball:
    """A threat model: a norm, a radius and the valid range of inputs.

    Args:
        norm: which one.
        eps: radius. In L∞ it may be a tensor that broadcasts to one example; step sizes are then in units of it.
        bounds: valid range; numbers, or tensors that broadcast to one example.
        projects: whether perturbations stay inside; False: only the bounds hold.
    """

    norm: Norm
    eps: Limit
    bounds: Bounds
    projects: bool = True

    @classmethod
    def of(cls, norm: str | Norm, eps: Limit, bounds: Bounds | Literal["auto"] | None = AUTO) -> Ball:
        """The ball of these settings, which are looked at."""
        norm = find_norm(norm)
        return cls(norm, check_eps(eps, norm), find_bounds(norm, bounds))

    def on(self, x: Tensor, *, check: bool = True) -> Ball:
        """The same ball with its tensors on the device and in the precision of ``x``."""
        eps, low, high = (
            (_broadcast(v, x, name) if check else v.to(x)) if isinstance(v, Tensor) else v
            for v, name in ((self.eps, "eps"), (self.bounds[0], "the lower bound"), (self.bounds[1], "the upper bound"))
        )
        return Ball(self.norm, eps, (low, high), self.projects)

    @property
    def unit(self) -> float:
        """What step sizes are computed from: eps, or 1 where they are in units of it."""
        return 1.0 if isinstance(self.eps, Tensor) else self.eps

    def step(self, images: Tensor, clean: Tensor, gradient: Tensor, size: Tensor, eps: Tensor | None = None) -> Tensor:
        """``images`` (n, …) moved by ``size`` along the gradient, and brought back.

        ``eps``: (n, 1, …) radii of each example's own, in the place of the ball's.
        """
        direction = self.norm.direction(gradient)
        if isinstance(self.eps, Tensor):
            direction = direction * self.eps
        radius = math.inf if not self.projects else self.eps if eps is None else eps
        return self.norm.project(images + size * direction, clean, radius, self.bounds)

    def check_inputs(self, x: Tensor) -> None:
        """ValueError unless ``x`` is inside the bounds; waits for the device."""
        check_range(self.norm.pixels_of(x), getattr(self.norm, "pixels", self.on(x).bounds))

    def check_perturbed(self, x: Tensor, x_prime: Tensor, eps: Tensor | None = None) -> None:
        """RuntimeError unless ``x_prime`` is in the ball around ``x`` and in the bounds; waits for the device."""
        ball, x_prime = self.on(x), x_prime.detach()
        slack = 0.05 if x.element_size() < 4 else 1e-3
        radius = ball.eps if eps is None else eps
        far = float(self.norm.distance(x_prime - x, radius).max()) if self.projects else 0.0
        if not far <= 1 + slack:
            raise RuntimeError(
                f"the attack moved an example by {far:.4g} times eps, out of its ball; look at the norm's project()"
            )
        check_range(self.norm.pixels_of(x_prime), getattr(self.norm, "pixels", ball.bounds), "x'")


def check_eps(eps: Limit, norm: Norm) -> Limit:
    """A radius above 0; tensors are for L∞, in pixels or not."""
    if not isinstance(eps, Tensor):
        return check_positive(eps, "eps")
    inner = norm.norm if isinstance(norm, Normalized) else norm
    if not isinstance(inner, Linf):
        raise ValueError("eps is a tensor, which is for L∞; give a number")
    if not bool((torch.isfinite(eps) & (eps > 0)).all()):
        raise ValueError("eps has values that are not above 0")
    return eps


def find_bounds(norm: Norm, bounds: Bounds | Literal["auto"] | None) -> Bounds:
    """The bounds that were given, or those that follow from the norm; a ValueError where the two differ."""
    if not isinstance(norm, Normalized):
        return (0.0, 1.0) if _is_auto(bounds) else check_bounds(bounds)
    own = norm.bounds
    if _is_auto(bounds):
        return own
    low, high = check_bounds(bounds)
    if isinstance(low, Tensor) or isinstance(high, Tensor) or not all(map(_close, (low, high), own)):
        raise ValueError(
            f"bounds are {'None' if bounds is None else brief((low, high))}, but the norm's pixels are in "
            f"{brief(norm.pixels)}, which makes them {brief(own)}; leave bounds out, and give Normalized(…, pixels=…)"
        )
    return own


def _is_auto(bounds: object) -> bool:
    return isinstance(bounds, str) and bounds == AUTO


def _broadcast(value: Tensor, x: Tensor, name: str) -> Tensor:
    """``value`` as ``x`` is, if it broadcasts to one example of it."""
    shape, wanted = tuple(value.shape), tuple(x.shape[1:])
    if len(shape) > len(wanted) or any(n not in (1, m) for n, m in zip(shape[::-1], wanted[::-1], strict=False)):
        raise ValueError(f"{name} has the shape {shape}; it has to broadcast to one example, {wanted}")
    return value.to(x)


def _close(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def per_example(values: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(m,) as (m, 1, …, 1), to go with ``like`` (m, …), in its precision unless told otherwise."""
    return values.to(dtype or like.dtype).view(-1, *(1,) * (like.ndim - 1))


def length(t: Tensor) -> Tensor:
    """Euclidean length (m,) of each example of (m, …)."""
    lengths: Tensor = torch.linalg.vector_norm(t.flatten(1), dim=1)
    return lengths
