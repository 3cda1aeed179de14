"""Allocations: how many attack steps each example gets."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bullettrain.history import Past
from bullettrain.mining import Category, signed_gradient_norm
from bullettrain.precision import accumulation_dtype
from bullettrain.validation import SettingsError, check_count, check_limits, check_number, limits

DEFAULT_SCALE = 2.25
"""Step size of boundary examples as a multiple of ε/N_B."""


class Allocated(NamedTuple):
    """The result of an allocation that decides on more than steps.

    Attributes:
        steps: (m,) integers; 0: the example is not corrupted.
        step_sizes: (m,); None: the result of :meth:`Allocation.step_sizes` for the objective's radius.
        eps: (m,) radii that steps are projected to; None: the objective's. The random start always has the
            objective's. Not for attacks that do not project, nor with a tensor as the objective's eps.
        weight: (m,) factors of the examples' losses, whose mean is the loss; None: 1 each.
    """

    steps: Tensor
    step_sizes: Tensor | None = None
    eps: Tensor | None = None
    weight: Tensor | None = None

    @classmethod
    def of(cls, returned: Tensor | Allocated) -> Allocated:
        """Return what an allocation returned; steps alone become an :class:`Allocated`."""
        if isinstance(returned, tuple) and not isinstance(returned, cls):
            raise TypeError("the budget's allocate returned a tuple; give Allocated(steps, eps=…), by name, or steps")
        return returned if isinstance(returned, Allocated) else cls(returned)


class Allocation(Protocol):
    """Interface of an allocation, which turns categories into steps. Any number of steps is allowed for each example.

    An allocation made of tensor operations is as fast as the built-in ones. Two optional members:

    * ``revise(t, logits, y, remaining) -> remaining`` may shorten attacks. It is called after iteration t with the
      logits (n, K) before that step, labels (n,) and remaining steps (n,). The batch then shrinks at
      every iteration, which reads from the device once each time.
    * ``selects = False`` declares that categories and scores are not used although steps differ. Nothing is forwarded
      to select then, and all examples are BOUNDARY.
    """

    @property
    def uniform_steps(self) -> int | None:
        """The number of steps if all examples get the same, else None. A uniform budget does not select."""
        ...

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Tensor | Allocated:
        """Return steps (m,), int64, for categories (m,), scores (m,) and the history of these examples."""
        ...

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """Return step sizes (m,), floating-point, for categories (m,) with ``steps`` (m,).

        ``eps`` is the objective's radius, or 1 if that is a tensor, in units of which step sizes then are.
        """
        ...


@dataclass(frozen=True)
class StepBudget:
    """The paper's scheme: N_B steps for boundary examples, N_R for robust ones, N_O for outliers.

    Args:
        boundary, robust, outlier: N_B, N_R, N_O. The method has N_O ≤ N_R < N_B; equal counts are allowed.
        ordered: refuse counts that violate this order; set it to False for studies.
        step_size: step size of boundary examples. None: 0.007 at ε = 0.031, else 2.25·ε/N_B.
        scale: step size of boundary examples as scale·ε/N_B instead (1.7 in the MNIST study). Step sizes of robust
            examples and outliers are always 1.7·ε/N.

    At ε = 0.031 the step size is the paper's for ten steps, whatever N_B is: three steps move a pixel by 0.021 at most,
    apart from the random start. `BulletTrain` warns if N_B steps are shorter than ε; ``scale=2.25`` makes them as long
    as at any other ε.
    """

    boundary: int = field(metadata=limits(least=0))
    robust: int = field(metadata=limits(least=0))
    outlier: int = field(default=0, metadata=limits(least=0))
    _: KW_ONLY
    ordered: bool = True
    step_size: float | None = field(default=None, metadata=limits(above=0))
    scale: float | None = field(default=None, metadata=limits(above=0))

    def __post_init__(self) -> None:
        check_limits(self)
        if self.ordered and not self.boundary >= self.robust >= self.outlier:
            steps = f"boundary={self.boundary}, robust={self.robust}, outlier={self.outlier}"
            wanted = "the method wants boundary ≥ robust ≥ outlier"
            raise SettingsError(f"{steps} are out of order; {wanted}. For a study, say", ordered=False)
        if self.step_size is not None and self.scale is not None:
            raise ValueError("step_size and scale are both given; give one of them")

    @classmethod
    def uniform(cls, steps: int, *, step_size: float | None = None, scale: float | None = None) -> StepBudget:
        """Return a budget of ``steps`` for all examples: the plain algorithm, without mining."""
        check_count(steps, "steps")
        return cls(steps, steps, steps, step_size=step_size, scale=scale)

    @property
    def uniform_steps(self) -> int | None:
        """The number of steps if all categories have the same, else None."""
        return self.boundary if self.boundary == self.robust == self.outlier else None

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Tensor:
        """Return steps (m,), int64, for categories (m,)."""
        return _by_category(category, self.boundary, self.robust, self.outlier, torch.int64)

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """Return step sizes (m,), float64, for categories (m,); 0 where there are no steps."""
        sizes = self.boundary_step(eps), _spread(1.7, eps, self.robust), _spread(1.7, eps, self.outlier)
        return _by_category(category, *sizes, accumulation_dtype(category.device))

    def boundary_step(self, eps: float) -> float:
        """Return the step size of boundary examples."""
        if not self.boundary:
            return 0.0
        if self.step_size is not None:
            return self.step_size
        if self.scale is None and math.isclose(eps, 0.031, rel_tol=1e-6):
            return 0.007  # the paper's setting, as the TRADES and MART authors have it
        return _spread(DEFAULT_SCALE if self.scale is None else self.scale, eps, self.boundary)

    def shortfall(self, eps: float, moves: int = 1, option: str = "") -> str | None:
        """Return a warning if all steps of a boundary example together are shorter than ``eps``, else None.

        Args:
            eps: radius of the ball.
            moves: moves of one step; more than one with YOPO.
            option: what comes before the name of a setting, "--set method." in the command.
        """
        total, size = self.boundary * moves, self.boundary_step(eps)
        if not total or total * size > 0.999 * eps:
            return None
        scale, enough = DEFAULT_SCALE / moves, DEFAULT_SCALE * eps / total
        return (
            f"the attack moves an example by {total} × {size:g} = {total * size:g} at most, less than eps {eps:g}; for "
            f"steps of 2.25·eps/{total} give {option}scale={scale:g} or {option}step_size={enough:g}"
        )


@dataclass(frozen=True)
class _Graded:
    """Base of allocations with any number of steps for each example, of size 1.7·ε over their number."""

    max_steps: int = field(metadata=limits(least=0))

    def __post_init__(self) -> None:
        check_limits(self)
        for name in ("min_steps", "outlier"):
            if getattr(self, name, 0) > self.max_steps:
                raise ValueError(f"{name} is {getattr(self, name)}, more than max_steps={self.max_steps}")

    @property
    def uniform_steps(self) -> int | None:
        """None: steps differ by example."""
        return None

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """Return 1.7·ε over the number of steps."""
        return 1.7 * eps / steps.clamp_min(1).to(accumulation_dtype(steps.device))

    def _known(self, past: Past | None) -> Past:
        if past is not None:
            return past
        name = type(self).__name__
        raise ValueError(f"{name} needs to know the examples; give BulletTrain dataset_size=, and steps index=")


@dataclass(frozen=True)
class GaussianBudget(_Graded):
    """Steps by a quantised Gaussian over the score: most at the boundary, SVar = 0, fewer away from it.

    The paper names this as future work. Outliers get ``outlier`` steps, whatever their score.

    Args:
        max_steps: N_B, steps at the boundary.
        width: standard deviation, relative to the largest absolute score among the examples of this process that are
            attacked together.
        min_steps: fewest steps of a correctly classified example.
        outlier: N_O.
    """

    width: float = field(default=0.5, metadata=limits(above=0))
    min_steps: int = field(default=1, metadata=limits(least=0))
    outlier: int = field(default=0, metadata=limits(least=0))

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Tensor:
        """Return round(max_steps · exp(−(score / (width · largest))² / 2)), at least ``min_steps``."""
        if score is None:
            raise ValueError("GaussianBudget needs the scores of the examples")
        away = score / (self.width * score.abs().amax().clamp_min(1e-12))
        steps = (self.max_steps * torch.exp(-away.square() / 2)).round().long().clamp(self.min_steps, self.max_steps)
        return torch.where(category == Category.OUTLIER, self.outlier, steps)


@dataclass(frozen=True)
class HistoryBudget(_Graded):
    """Steps by each example's last margin on x': examples that the last attack broke, or nearly broke, get more.

    The margin is the probability of the true class minus the largest other one, from −1 to 1. Examples that have not
    been seen yet get ``max_steps``.

    Args:
        max_steps: steps at a last margin of 0 or below.
        min_steps: steps at a last margin of 1.
    """

    min_steps: int = field(default=1, metadata=limits(least=0))
    selects = False

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Tensor:
        """Return steps that are linear in the last margin, rounded up."""
        past = self._known(past)
        spread = (self.max_steps - self.min_steps) * (1 - past.margin.clamp(0, 1))
        steps = (self.min_steps + spread - 1e-6).ceil().long().clamp(self.min_steps, self.max_steps)
        return torch.where(past.visits > 0, steps, self.max_steps)


@dataclass(frozen=True)
class _SameSteps(_Graded):
    """Base of allocations that start with the same steps for all examples."""

    @property
    def uniform_steps(self) -> int:
        """The steps that all examples start with."""
        return self.max_steps

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Tensor | Allocated:
        """Return ``max_steps`` for all examples."""
        return torch.full_like(category, self.max_steps)


@dataclass(frozen=True)
class EarlyStopBudget(_SameSteps):
    """Stop each attack soon after it succeeds, as in friendly adversarial training (Zhang et al., 2020).

    Success is read off the logits that an iteration computes anyway, so that no selection forward is needed.

    Args:
        max_steps: steps if the attack does not succeed.
        extra_steps: τ ≥ 1, steps from the first misclassified point on.
    """

    extra_steps: int = field(default=1, metadata=limits(least=1))

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """Return 2.25·ε over ``max_steps``."""
        return StepBudget.uniform(self.max_steps, scale=DEFAULT_SCALE).step_sizes(category, steps, eps)

    def revise(self, t: int, logits: Tensor, y: Tensor, remaining: Tensor) -> Tensor:
        """Return at most ``extra_steps`` − 1 remaining steps where the point before this step was misclassified."""
        return torch.where(logits.argmax(dim=1) == y, remaining, remaining.clamp_max(self.extra_steps - 1))


@dataclass(frozen=True)
class SecondStepBudget(_SameSteps):
    """One step of 1.25·ε for all, and more for the examples with the largest first gradient.

    The gradient of the cross-entropy at the logits is the softmax minus the label, so that the logits of the first step
    suffice. Misclassified examples come first, then those with the longest gradient, among the examples that are
    attacked together.

    Args:
        max_steps: steps of the chosen examples.
        share: share of the examples that are chosen.
    """

    max_steps: int = field(default=2, metadata=limits(least=0))
    share: float = field(default=0.25, metadata=limits(least=0, most=1))

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """Return 1.25·ε for all."""
        return torch.full_like(category, 1.25 * eps, dtype=accumulation_dtype(category.device))

    def revise(self, t: int, logits: Tensor, y: Tensor, remaining: Tensor) -> Tensor:
        """Return no further steps after the first, except for the chosen examples."""
        if t > 0:
            return remaining
        rank = signed_gradient_norm(logits, y).argsort(stable=True).argsort()
        return torch.where(rank < round(self.share * len(y)), remaining, 0)


@dataclass(frozen=True)
class RadiusBudget(_SameSteps):
    """The same steps for all, in a smaller ball for examples that the last attack broke by far.

    Args:
        max_steps: steps.
        eps: radius at a last margin on x' of 0 or above, and for examples that have not been seen yet: the objective's.
        min_radius: radius at a last margin of −1, relative to ``eps``.
    """

    eps: float = field(default=0.031, metadata=limits(above=0))
    min_radius: float = field(default=0.5, metadata=limits(above=0, most=1))

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Allocated:
        """Return radii, and step sizes with them, that are linear in the last margin below 0."""
        past = self._known(past)
        part = 1 + (1 - self.min_radius) * past.margin.clamp(-1, 0)
        part = torch.where(past.visits > 0, part, 1.0)
        size = StepBudget.uniform(self.max_steps, scale=DEFAULT_SCALE).boundary_step(self.eps)
        return Allocated(torch.full_like(category, self.max_steps), size * part, self.eps * part)


class ShuffledBudget:
    """The control of an allocation: its steps, shuffled over the examples that are attacked together.

    The number of passes is the same; only which example gets which steps is random.

    Args:
        budget: the allocation to shuffle.
        eps: the objective's, for step sizes; 1 if that is a tensor.
    """

    def __init__(self, budget: Allocation, eps: float) -> None:
        if hasattr(budget, "revise"):
            raise ValueError("the budget revises steps during the attack, which cannot be dealt out beforehand")
        self.budget, self.eps = budget, check_number(eps, "eps", above=0)

    @property
    def uniform_steps(self) -> int | None:
        """That of the budget."""
        return self.budget.uniform_steps

    @property
    def selects(self) -> bool:
        """Whether the budget uses categories or scores."""
        return needs_selection(self.budget)

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Allocated:
        """Return the result of the budget in random order: steps with their sizes, radii and weights."""
        given = Allocated.of(self.budget.allocate(category, score, past))
        if given.step_sizes is None:
            given = given._replace(step_sizes=self.budget.step_sizes(category, given.steps, self.eps))
        order = torch.rand(len(category), device=category.device).argsort()
        dealt = {name: values[order] for name, values in given._asdict().items() if values is not None}
        return Allocated(**dealt)

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """Return the step sizes of the budget."""
        return self.budget.step_sizes(category, steps, eps)


def needs_selection(budget: Allocation) -> bool:
    """Return whether a step with this budget has to select: not if it is uniform or declares ``selects = False``."""
    return bool(getattr(budget, "selects", budget.uniform_steps is None))


def _by_category(category: Tensor, boundary: float, robust: float, outlier: float, dtype: torch.dtype) -> Tensor:
    values = torch.full_like(category, outlier, dtype=dtype)
    values.masked_fill_(category == Category.ROBUST, robust)
    return values.masked_fill_(category == Category.BOUNDARY, boundary)


def _spread(scale: float, eps: float, steps: int) -> float:
    return scale * eps / steps if steps else 0.0
