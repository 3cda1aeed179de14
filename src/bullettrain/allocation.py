"""How many steps each example gets."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bullettrain.history import Past
from bullettrain.mining import Category, signed_gradient_norm
from bullettrain.precision import accumulation_dtype
from bullettrain.validation import MendableError, check_count, check_fraction, check_positive


class Allocated(NamedTuple):
    """What each example gets: more than its steps, where an allocation decides that too."""

    steps: Tensor
    """(m,) whole numbers; none: the example stays as it is."""
    step_sizes: Tensor | None = None
    """(m,); None: what :meth:`Allocation.step_sizes` says."""
    eps: Tensor | None = None
    """(m,) radii of the attacks; None: the objective's."""
    weight: Tensor | None = None
    """(m,) in the loss; None: 1 each."""


class Allocation(Protocol):
    """A scheme that turns categories into steps. The engine takes any counts and any step sizes.

    One that is made of tensor operations is as fast as the built-in ones. It may also have a method
    ``revise(t, logits, y, remaining) -> remaining``: after iteration t of the attack it is given the logits (n, K) that
    iteration saw, labels (n,) and the steps (n,) that these examples have left, and may shorten them. The attack is
    then ragged, and the host is asked once an iteration how many are left. With ``selects = False`` it says that it
    looks at neither categories nor scores, though steps differ: nothing is forwarded for them, and all are BOUNDARY.
    """

    @property
    def uniform_steps(self) -> int | None:
        """The one number of steps that everybody gets, or None. With it nothing has to be selected."""
        ...

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Tensor | Allocated:
        """Steps (m,), int64, for categories (m,), their scores (m,), and what is remembered of the examples."""
        ...

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """Step sizes (m,), floating, for categories (m,) that were given ``steps`` (m,) in a ball of ``eps``."""
        ...


@dataclass(frozen=True)
class StepBudget:
    """The paper's scheme: N_B steps for boundary examples, N_R for robust ones, N_O for outliers.

    Args:
        boundary, robust, outlier: N_B, N_R, N_O. The method wants N_O ≤ N_R < N_B; equal counts are let through.
        ordered: refuse counts that are out of that order; studies set it to False.
        step_size: α of the boundary examples. None: 0.007 at ε = 0.031, else 2.25·ε/N_B.
        scale: α = scale·ε/N_B instead (the MNIST study: 1.7). Robust and outlier steps are 1.7·ε/N always.
    """

    boundary: int
    robust: int
    outlier: int = 0
    _: KW_ONLY
    ordered: bool = True
    step_size: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("boundary", "robust", "outlier"):
            check_count(getattr(self, name), name)
        if self.ordered and not self.boundary >= self.robust >= self.outlier:
            raise MendableError(
                f"boundary={self.boundary}, robust={self.robust}, outlier={self.outlier} are out of order; the "
                "method wants boundary ≥ robust ≥ outlier. For a study, say",
                ordered=False,
            )
        if self.step_size is not None and self.scale is not None:
            raise ValueError("step_size and scale are both given; give one of them")
        for name in ("step_size", "scale"):
            if getattr(self, name) is not None:
                check_positive(getattr(self, name), name)

    @classmethod
    def uniform(cls, steps: int, *, step_size: float | None = None, scale: float | None = None) -> StepBudget:
        """``steps`` for everyone: the plain algorithm, without mining."""
        return cls(steps, steps, steps, step_size=step_size, scale=scale)

    @property
    def uniform_steps(self) -> int | None:
        """The number of steps that everybody gets, or None where the classes differ."""
        return self.boundary if self.boundary == self.robust == self.outlier else None

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Tensor:
        """Steps (m,), int64, for categories (m,). Scores and the past are not needed here."""
        return _by_category(category, self.boundary, self.robust, self.outlier, torch.int64)

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """Step sizes (m,), float64, for categories (m,); 0 where there are no steps."""
        sizes = self.boundary_step(eps), _spread(1.7, eps, self.robust), _spread(1.7, eps, self.outlier)
        return _by_category(category, *sizes, accumulation_dtype(category.device))

    def boundary_step(self, eps: float) -> float:
        """α of the boundary examples."""
        if not self.boundary:
            return 0.0
        if self.step_size is not None:
            return self.step_size
        if self.scale is None and eps == 0.031:
            return 0.007  # the paper's setting, as the TRADES and MART authors have it
        return _spread(2.25 if self.scale is None else self.scale, eps, self.boundary)


@dataclass(frozen=True)
class _Graded:
    """A scheme with steps of its own for each example, of 1.7·ε over their number."""

    most: int

    def __post_init__(self) -> None:
        check_count(self.most, "most")

    @property
    def uniform_steps(self) -> int | None:
        """None: each example has its own number."""
        return None

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """1.7·ε over the number of steps."""
        return 1.7 * eps / steps.clamp_min(1).to(accumulation_dtype(steps.device))


@dataclass(frozen=True)
class GaussianBudget(_Graded):
    """Steps by a quantised Gaussian over the score: the most at the boundary, SVar = 0, fewer away from it.

    The paper names this as future work. Outliers get ``outlier`` steps, whatever their score.

    Args:
        most: N_B, steps at the boundary.
        width: standard deviation, as a part of the largest score among the examples that are attacked together: this
            process's, in all mini-batches of a group.
        least: the fewest steps of a correctly classified example.
        outlier: N_O.
    """

    width: float = 0.5
    least: int = 1
    outlier: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.width, "width")
        for name in ("least", "outlier"):
            if check_count(getattr(self, name), name) > self.most:
                raise ValueError(f"{name} is {getattr(self, name)}, more than most={self.most}")

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Tensor:
        """round(most · exp(−(score / (width · largest))² / 2)), at least ``least``."""
        assert score is not None
        away = score / (self.width * score.abs().amax().clamp_min(1e-12))
        steps = (self.most * torch.exp(-away.square() / 2)).round().long().clamp(self.least, self.most)
        return torch.where(category == Category.OUTLIER, self.outlier, steps)


@dataclass(frozen=True)
class HistoryBudget(_Graded):
    """Steps decided for each example from its history: those that its last attack nearly lost, or lost, get more.

    The margin on x' is the probability of the true class less the largest other one, from −1 to 1. Examples that have
    not been seen yet get ``most``.

    Args:
        most: steps where the last margin was 0 or below.
        least: steps where it was 1.
    """

    least: int = 1
    selects = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_count(self.least, "least") > self.most:
            raise ValueError(f"least is {self.least}, more than most={self.most}")

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Tensor:
        """Linear in the last margin, rounded up."""
        if past is None:
            raise ValueError("HistoryBudget needs to know the examples; give BulletTrain examples=, and steps index=")
        spread = (self.most - self.least) * (1 - past.margin.clamp(0, 1))
        steps = (self.least + spread - 1e-6).ceil().long().clamp(self.least, self.most)
        return torch.where(past.visits > 0, steps, self.most)


@dataclass(frozen=True)
class _Shortened(_Graded):
    """A scheme in which everybody begins with the most steps, and ``revise`` shortens attacks."""

    @property
    def uniform_steps(self) -> int:
        """What everybody begins with."""
        return self.most

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Tensor:
        """The most for all."""
        return torch.full_like(category, self.most)


@dataclass(frozen=True)
class EarlyStopBudget(_Shortened):
    """Everybody's attack stops soon after it has succeeded, as in friendly adversarial training (Zhang et al., 2020).

    Whether it has is seen from the logits that an iteration forwards anyway, so that nothing is selected beforehand.

    Args:
        most: steps where it does not succeed.
        further: τ ≥ 1, steps from the first point on that is misclassified.
    """

    further: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_count(self.further, "further") == 0:
            raise ValueError("further is 0; the step in which a success is seen is taken already, so give 1 or more")

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """Those of a uniform budget."""
        return StepBudget.uniform(self.most).step_sizes(category, steps, eps)

    def revise(self, t: int, logits: Tensor, y: Tensor, remaining: Tensor) -> Tensor:
        """Steps left: few where the point that this iteration moved was misclassified."""
        return torch.where(logits.argmax(dim=1) == y, remaining, remaining.clamp_max(self.further - 1))


@dataclass(frozen=True)
class SecondStepBudget(_Shortened):
    """One step of 1.25·ε for everybody, and more of them for those whose first gradient stands out.

    That is seen from the logits that the first step forwards anyway: the gradient of the cross-entropy there is the
    softmax less the label. The misclassified go on first, then those whose gradient is longest, over the mini-batch,
    or the group that is attacked at once.

    Args:
        most: steps of those.
        share: how many they are, as a part of all.
    """

    most: int = 2
    share: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self.share, "share")

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """That of a single step, also for those that go on."""
        return torch.full_like(category, 1.25 * eps, dtype=accumulation_dtype(category.device))

    def revise(self, t: int, logits: Tensor, y: Tensor, remaining: Tensor) -> Tensor:
        """After the first step none for all but the longest gradients."""
        if t > 0:
            return remaining
        rank = signed_gradient_norm(logits, y).argsort(stable=True).argsort()
        return torch.where(rank < round(self.share * len(y)), remaining, 0)


@dataclass(frozen=True)
class RadiusBudget(_Graded):
    """The same steps for everybody, in a ball that is smaller where the last attack went far: strength, not steps.

    Args:
        most: steps.
        eps: radius where the last margin on x' was 0 or above, or nothing is known.
        low: part of it where that margin was −1.
    """

    eps: float = 0.031
    low: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.eps, "eps")
        check_fraction(self.low, "low", low_open=True)

    @property
    def uniform_steps(self) -> int:
        """What everybody gets: nothing is selected."""
        return self.most

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Allocated:
        """Radius, and step size with it, linear in the last margin below 0."""
        if past is None:
            raise ValueError("RadiusBudget needs to know the examples; give BulletTrain examples=, and steps index=")
        part = 1 + (1 - self.low) * past.margin.clamp(-1, 0)
        part = torch.where(past.visits > 0, part, 1.0)
        size = StepBudget.uniform(self.most).boundary_step(self.eps)
        return Allocated(torch.full_like(category, self.most), size * part, self.eps * part)


class ShuffledBudget:
    """The control of any allocation: what it gives, dealt out to the examples of the mini-batch by chance.

    The same steps are made, so that passes are equal; only who gets them differs.

    Args:
        budget: what is dealt out.
        eps: the objective's, for step sizes.
    """

    def __init__(self, budget: Allocation, eps: float) -> None:
        if hasattr(budget, "revise"):
            raise ValueError("the budget revises steps during the attack, which cannot be dealt out beforehand")
        self.budget, self.eps = budget, check_positive(eps, "eps")

    @property
    def uniform_steps(self) -> int | None:
        """The budget's."""
        return self.budget.uniform_steps

    @property
    def selects(self) -> bool:
        """Whether the budget looks at categories or scores."""
        return selects(self.budget)

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Allocated:
        """What the budget gives, in another order: steps together with their sizes, radii and weights."""
        given = self.budget.allocate(category, score, past)
        given = given if isinstance(given, Allocated) else Allocated(given)
        if given.step_sizes is None:
            given = given._replace(step_sizes=self.budget.step_sizes(category, given.steps, self.eps))
        order = torch.rand(len(category), device=category.device).argsort()
        dealt = {name: values[order] for name, values in given._asdict().items() if values is not None}
        return Allocated(**dealt)

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """The budget's, for everybody alike."""
        return self.budget.step_sizes(category, steps, eps)


def selects(budget: Allocation) -> bool:
    """Whether anything has to be selected: not where everybody gets the same steps, nor where the budget says so."""
    return bool(getattr(budget, "selects", budget.uniform_steps is None))


def _by_category(category: Tensor, boundary: float, robust: float, outlier: float, dtype: torch.dtype) -> Tensor:
    values = torch.full_like(category, outlier, dtype=dtype)
    values.masked_fill_(category == Category.ROBUST, robust)
    return values.masked_fill_(category == Category.BOUNDARY, boundary)


def _spread(scale: float, eps: float, steps: int) -> float:
    return scale * eps / steps if steps else 0.0
