"""Norms and balls of attacks. A norm is four small methods; the attack loop is in pgd.py."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bullettrain.brief import brief
from bullettrain.precision import at_least_float32
from bullettrain.validation import check_bounds, check_known, check_number, check_range, rounding

Limit = float | Tensor
"""A number, or a tensor that broadcasts to one example: (C, 1, 1) for images, (D,) for tabular data."""

Bounds = tuple[Limit, Limit]
"""The valid range of inputs, (low, high)."""

AUTO: Literal["auto"] = "auto"
"""Bounds that follow from the norm: those of :class:`Normalized`, else (0, 1)."""


class Norm(ABC):
    """Base class of norms."""

    @abstractmethod
    def noise(self, x: Tensor, eps: Limit, generator: torch.Generator | None) -> Tensor:
        """Draw uniformly from the ball of radius ``eps``, shaped like ``x`` (m, …)."""

    @abstractmethod
    def direction(self, gradient: Tensor) -> Tensor:
        """Return the direction of steepest ascent, of length 1, for a gradient (m, …)."""

    @abstractmethod
    def project(self, x_adv: Tensor, x: Tensor, eps: Limit, bounds: Bounds) -> Tensor:
        """Project ``x_adv`` (m, …) into the ball around ``x`` (m, …) and into ``bounds``."""

    @abstractmethod
    def distance(self, delta: Tensor, eps: Limit) -> Tensor:
        """Return the length (m,) of perturbations (m, …) in units of ``eps``; above 1 is outside the ball."""

    def pixels_of(self, x: Tensor) -> Tensor:
        """Return ``x`` (m, …) in the units of ``bounds``."""
        return x

    def clip(self, x: Tensor, bounds: Bounds) -> Tensor:
        """Clamp ``x`` (m, …) to ``bounds``."""
        return x.clamp(min=bounds[0]).clamp(max=bounds[1])


class Linf(Norm):
    """L∞: every value may change by ``eps``."""

    def noise(self, x: Tensor, eps: Limit, generator: torch.Generator | None) -> Tensor:
        """Draw each value uniformly from [−eps, eps]."""
        if isinstance(eps, Tensor):
            return torch.empty_like(x).uniform_(-1, 1, generator=generator) * eps
        return torch.empty_like(x).uniform_(-eps, eps, generator=generator)

    def direction(self, gradient: Tensor) -> Tensor:
        """Return the sign of the gradient."""
        return gradient.sign()

    def project(self, x_adv: Tensor, x: Tensor, eps: Limit, bounds: Bounds) -> Tensor:
        """Clamp to the intersection of the ball and the bounds."""
        low, high = (x - eps).clamp(min=bounds[0]), (x + eps).clamp(max=bounds[1])
        return x_adv.clamp(low, high)

    def distance(self, delta: Tensor, eps: Limit) -> Tensor:
        """Return the largest absolute value in units of eps."""
        return (delta.abs() / eps).flatten(1).amax(dim=1)


class L2(Norm):
    """L2: the example may change by ``eps`` in Euclidean distance."""

    def noise(self, x: Tensor, eps: Limit, generator: torch.Generator | None) -> Tensor:
        """Draw a random direction and a radius eps·U^(1/d), which is uniform in the ball."""
        direction = torch.empty_like(x).normal_(generator=generator)
        radius = torch.empty(len(x), dtype=x.dtype, device=x.device).uniform_(generator=generator)
        dimensions = x[0].numel()
        return self.direction(direction) * per_example(eps * radius.pow(1 / dimensions), x)

    def direction(self, gradient: Tensor) -> Tensor:
        """Return the gradient with length 1; 0 stays 0."""
        lengths = length(gradient).clamp_min(1e-12)
        return (gradient / per_example(lengths, gradient, lengths.dtype)).to(gradient.dtype)

    def project(self, x_adv: Tensor, x: Tensor, eps: Limit, bounds: Bounds) -> Tensor:
        """Shorten to the radius, then clamp; if ``x`` is within the bounds, clamping only shortens further."""
        delta = x_adv - x
        radius = eps.flatten(0) if isinstance(eps, Tensor) else eps  # (m,) if each example has its own
        delta = delta * per_example((radius / length(delta).clamp_min(1e-12)).clamp_max(1.0), x)
        return self.clip(x + delta, bounds)

    def distance(self, delta: Tensor, eps: Limit) -> Tensor:
        """Return the Euclidean length in units of eps."""
        return length(delta) / (eps.flatten(0) if isinstance(eps, Tensor) else eps)


NORMS: dict[str, Norm] = {"linf": Linf(), "l2": L2()}
USUAL_EPS = {"linf": 0.031, "l2": 0.5}
"""Default radii: the paper's for L∞, and the usual one on CIFAR-10 for L2."""


def find_norm(norm: str | Norm) -> Norm:
    """Return the norm with this name, case-insensitive; a norm is returned as it is."""
    if isinstance(norm, Norm):
        return norm
    return NORMS[check_known(norm.lower() if isinstance(norm, str) else norm, NORMS, "there is no norm")]


class Normalized(Norm):
    """A norm in pixels for inputs that the loader has normalised: x = (pixel − mean) / std.

    ``eps`` and step sizes are in pixels, and x' has valid pixels. The objective takes its bounds from the norm.

    Args:
        mean: (C,) mean of each channel; (D,) for tabular data.
        std: standard deviation of each channel.
        norm: "linf" or "l2", in pixels.
        pixels: valid range of pixels; None: unbounded.
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
        """Range of normalised inputs over all channels."""
        ends = [(value - self.mean) / self.std for value in self.pixels]
        return float(ends[0].min()), float(ends[1].max())

    def noise(self, x: Tensor, eps: Limit, generator: torch.Generator | None) -> Tensor:
        """Draw uniformly from the ball in pixels."""
        return self.norm.noise(x, eps, generator) / self._of(x)[1]

    def direction(self, gradient: Tensor) -> Tensor:
        """Return the direction of steepest ascent, of length 1 in pixels."""
        std = self._of(gradient)[1]
        return self.norm.direction(gradient / std) / std

    def project(self, x_adv: Tensor, x: Tensor, eps: Limit, bounds: Bounds) -> Tensor:
        """Project into the ball in pixels around ``x``, and to valid pixels."""
        mean, std = self._of(x)
        inside = self.norm.project(x_adv * std + mean, x * std + mean, eps, self.pixels)
        return (inside - mean) / std

    def distance(self, delta: Tensor, eps: Limit) -> Tensor:
        """Return the length in pixels, in units of eps."""
        return self.norm.distance(delta * self._of(delta)[1], eps)

    def pixels_of(self, x: Tensor) -> Tensor:
        """Return x·std + mean."""
        mean, std = self._of(x)
        return x * std + mean

    def clip(self, x: Tensor, bounds: Bounds) -> Tensor:
        """Clamp to valid pixels."""
        mean, std = self._of(x)
        return (self.norm.clip(x * std + mean, self.pixels) - mean) / std

    def _of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and std in the shape, dtype and device of ``x`` (m, C, …); cached."""
        key = x.device, x.dtype, x.ndim
        if key not in self._ready:
            if x.ndim < 2 or x.shape[1] != len(self.mean):
                raise ValueError(f"x has the shape {tuple(x.shape)}; the norm is of {len(self.mean)} channels")
            shape = (-1, *(1,) * (x.ndim - 2))
            self._ready[key] = self.mean.to(x).view(shape), self.std.to(x).view(shape)
        return self._ready[key]


def in_pixels(norm: Norm) -> Norm:
    """Return the norm inside :class:`Normalized`, or the norm itself."""
    return norm.norm if isinstance(norm, Normalized) else norm


@dataclass(frozen=True)
class Ball:
    """A threat model: a norm, a radius and the valid range of inputs.

    Args:
        norm: the norm.
        eps: radius. In L∞ it may be a tensor that broadcasts to one example; step sizes are then in units of it.
        bounds: valid range; numbers, or tensors that broadcast to one example.
        projects: whether steps are projected into the ball; False: only into the bounds.
    """

    norm: Norm
    eps: Limit
    bounds: Bounds
    projects: bool = True

    @classmethod
    def of(cls, norm: str | Norm, eps: Limit, bounds: Bounds | Literal["auto"] | None = AUTO) -> Ball:
        """Return the ball of these settings, after checking them."""
        norm = find_norm(norm)
        ball = cls(norm, check_eps(eps, norm), find_bounds(norm, bounds))
        ball._check_length(eps, "eps")
        return ball

    def on(self, x: Tensor, *, check: bool = True) -> Ball:
        """Return the ball with its tensors on the device and in the dtype of ``x``."""
        eps, low, high = (
            (_broadcast(v, x, name) if check else v.to(x)) if isinstance(v, Tensor) else v
            for v, name in ((self.eps, "eps"), (self.bounds[0], "the lower bound"), (self.bounds[1], "the upper bound"))
        )
        return Ball(self.norm, eps, (low, high), self.projects)

    @property
    def unit(self) -> float:
        """Unit of step sizes: eps, or 1 if eps is a tensor."""
        return 1.0 if isinstance(self.eps, Tensor) else self.eps

    def step(self, images: Tensor, clean: Tensor, gradient: Tensor, size: Tensor, eps: Tensor | None = None) -> Tensor:
        """Move ``images`` (n, …) by ``size`` along the gradient, and project them.

        Args:
            images: (n, …) current points.
            clean: (n, …) centres of the balls.
            gradient: (n, …).
            size: (n, 1, …) step sizes.
            eps: (n, 1, …) radius of each example; None: the ball's.
        """
        direction = self.norm.direction(gradient)
        if isinstance(self.eps, Tensor):
            direction = direction * self.eps
        radius = math.inf if not self.projects else self.eps if eps is None else eps
        return self.norm.project(images + size * direction, clean, radius, self.bounds)

    def check_step(self, size: float, name: str) -> None:
        """Raise ValueError if a step crosses the ball and the range of pixels. With a tensor as eps it is unchecked."""
        if not isinstance(self.eps, Tensor) and size > 2.25 * self.eps:  # which is a usual single step
            self._check_length(size, name)

    def doubt(self) -> str | None:
        """Return a warning if eps in L∞ is tiny for the range of pixels, as 8/255 is for [0, 255], else None."""
        low, high = getattr(self.norm, "pixels", self.bounds)
        numbers = not any(isinstance(value, Tensor) for value in (self.eps, low, high))
        if numbers and isinstance(in_pixels(self.norm), Linf) and self.eps < 1e-3 * (high - low) < math.inf:
            meant = self.eps * (high - low)
            return f"eps is {self.eps:g}, but pixels are in [{low:g}, {high:g}]; did you mean {meant:g}?"
        return None

    def _check_length(self, length: Limit, name: str) -> None:
        """Raise ValueError if a length in L∞ is above the range of pixels: 8 is meant as 8/255."""
        low, high = getattr(self.norm, "pixels", self.bounds)
        above = length > high - low
        if isinstance(in_pixels(self.norm), Linf) and (bool(above.any()) if isinstance(above, Tensor) else above):
            size, *ends = (f"{float(torch.as_tensor(value).max()):g}" for value in (length, low, high))
            raise ValueError(f"{name} is {size}, but pixels are in [{', '.join(ends)}]; did you mean {size}/255?")

    def check_inputs(self, x: Tensor) -> None:
        """Raise ValueError if ``x`` is outside the bounds; synchronises with the device."""
        check_range(self.norm.pixels_of(x), getattr(self.norm, "pixels", self.on(x).bounds))

    def check_perturbed(self, x: Tensor, x_prime: Tensor, eps: Tensor | None = None) -> None:
        """Raise RuntimeError if ``x_prime`` is outside the ball around ``x``; synchronises with the device."""
        ball, x, x_prime = self.on(x), x.detach(), x_prime.detach()
        slack = 0.05 if x.element_size() < 4 else 1e-3
        if self.projects:
            clean, corrupted = (self.norm.pixels_of(at_least_float32(t)) for t in (x, x_prime))
            rounded, delta = rounding(clean, x.dtype), corrupted - clean
            delta = delta - delta.clamp(-rounded, rounded)
            distance = in_pixels(self.norm).distance(delta, ball.eps if eps is None else eps)
            far = float(distance.where(delta.flatten(1).any(dim=1), 0.0).max())  # eps may be 0 where nothing moved
            if not far <= 1 + slack:
                raise RuntimeError(f"an attack went {far:.4g} times eps, out of its ball; look at the norm's project()")
        check_range(self.norm.pixels_of(x_prime), getattr(self.norm, "pixels", ball.bounds), "x'")


def check_eps(eps: Limit, norm: Norm) -> Limit:
    """Return a radius above 0; tensors are allowed in L∞."""
    if not isinstance(eps, Tensor):
        return check_number(eps, "eps", above=0)
    if not isinstance(in_pixels(norm), Linf):
        raise ValueError("eps is a tensor, which is for L∞; give a number")
    if not bool((torch.isfinite(eps) & (eps > 0)).all()):
        raise ValueError("eps has values that are not above 0")
    return eps


def find_bounds(norm: Norm, bounds: Bounds | Literal["auto"] | None) -> Bounds:
    """Return the given bounds, or those that follow from the norm; raise ValueError if the two differ."""
    if not isinstance(norm, Normalized):
        return (0.0, 1.0) if _is_auto(bounds) else check_bounds(bounds)
    own = norm.bounds
    if _is_auto(bounds):
        return own
    low, high = check_bounds(bounds)
    if isinstance(low, Tensor) or isinstance(high, Tensor) or not all(map(_close, (low, high), own)):
        given = "None" if bounds is None else brief((low, high))
        wrong = f"bounds are {given}, but the norm's pixels are in {brief(norm.pixels)}, which makes them {brief(own)}"
        raise ValueError(f"{wrong}; leave bounds out, and give Normalized(…, pixels=…)")
    return own


def _is_auto(bounds: object) -> bool:
    return isinstance(bounds, str) and bounds == AUTO


def _broadcast(value: Tensor, x: Tensor, name: str) -> Tensor:
    """Return ``value`` on the device and in the dtype of ``x``, if it broadcasts to one example of ``x``."""
    shape, wanted = tuple(value.shape), tuple(x.shape[1:])
    if len(shape) > len(wanted) or any(n not in (1, m) for n, m in zip(shape[::-1], wanted[::-1], strict=False)):
        raise ValueError(f"{name} has the shape {shape}; it has to broadcast to one example, {wanted}")
    return value.to(x)


def _close(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def per_example(values: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return (m,) values as (m, 1, …, 1), to broadcast with ``like`` (m, …), in its dtype unless given."""
    return values.to(dtype or like.dtype).view(-1, *(1,) * (like.ndim - 1))


def length(t: Tensor) -> Tensor:
    """Return the Euclidean length (m,) of each example of (m, …), in at least float32: 1e-12 is 0 in float16."""
    lengths: Tensor = torch.linalg.vector_norm(at_least_float32(t.flatten(1)), dim=1)
    return lengths
