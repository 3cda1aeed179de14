"""How many steps each example gets, and what that costs: counted passes and the paper's theoretical speed-up."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import torch
from torch import Tensor

from bullettrain.checks import MendableError, check_count, check_positive
from bullettrain.mining import Category
from bullettrain.precision import widest


class Allocation(Protocol):
    """A scheme that turns categories into steps. The engine takes any counts and any step sizes."""

    @property
    def uniform_steps(self) -> int | None:
        """The one number of steps that everybody gets, or None. With it nothing has to be selected."""
        ...

    def allocate(self, category: Tensor, svar: Tensor | None = None) -> Tensor:
        """Steps (m,), int64, for categories (m,) and their scores (m,)."""
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

    def allocate(self, category: Tensor, svar: Tensor | None = None) -> Tensor:
        """Steps (m,), int64, for categories (m,). The scores ``svar`` are not needed here."""
        return _by_category(category, self.boundary, self.robust, self.outlier, torch.int64)

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """Step sizes (m,), float64, for categories (m,); 0 where there are no steps."""
        sizes = self.boundary_step(eps), _spread(1.7, eps, self.robust), _spread(1.7, eps, self.outlier)
        return _by_category(category, *sizes, widest(category.device))

    def boundary_step(self, eps: float) -> float:
        """α of the boundary examples."""
        if not self.boundary:
            return 0.0
        if self.step_size is not None:
            return self.step_size
        if self.scale is None and eps == 0.031:
            return 0.007  # the paper's setting, as the TRADES and MART authors have it
        return _spread(2.25 if self.scale is None else self.scale, eps, self.boundary)


def _by_category(category: Tensor, boundary: float, robust: float, outlier: float, dtype: torch.dtype) -> Tensor:
    values = torch.full_like(category, outlier, dtype=dtype)
    values.masked_fill_(category == Category.ROBUST, robust)
    return values.masked_fill_(category == Category.BOUNDARY, boundary)


def _spread(scale: float, eps: float, steps: int) -> float:
    return scale * eps / steps if steps else 0.0


# -------------------------------------------------------------------------------------------- what it costs


def theoretical_speedup(
    budget: StepBudget,
    *,
    boundary: float,
    robust: float,
    outlier: float,
    steps: int | None = None,
    views: int = 1,
) -> float:
    """The paper's figure: sequential passes of the plain algorithm over those with ``budget``.

    (N + 1) / (F_B·N_B + F_R·N_R + F_O·N_O + 1) for attacks; with ``views=2`` AugMix's 3 / (1 + 2·F_B).
    It is an upper bound on parallel hardware without limits, not a measurement: see :class:`Cost`.

    Args:
        budget: N_B, N_R, N_O.
        boundary, robust, outlier: measured average fractions F_B, F_R, F_O.
        steps: N of the plain algorithm; N_B unless given.
        views: forwards that one step of the corruption adds; 1 for an attack, 2 for AugMix's two views.
    """
    plain = budget.boundary if steps is None else check_count(steps, "steps")
    spent = boundary * budget.boundary + robust * budget.robust + outlier * budget.outlier
    return (views * plain + 1) / (views * spent + 1)


@dataclass(frozen=True)
class Work:
    """Counted passes of one step, summed over the examples: a forward, a backward to the input and a
    backward to the weights are one each."""

    examples: int
    selection: float
    """To choose: clean logits that nothing else needs."""
    attack: float
    """To corrupt: the target of the attack and its steps."""
    update: float
    """To learn: training-mode forward and backward."""

    @property
    def total(self) -> float:
        """All passes of the step."""
        return self.selection + self.attack + self.update

    @property
    def per_example(self) -> float:
        """Passes an example: 27 for plain TRADES with ten steps."""
        return self.total / self.examples


@dataclass(frozen=True)
class Cost:
    """What an objective's parts cost, in passes an example."""

    selection: int = 0
    """Forward that selects; not made with a uniform budget, and 0 where the loss's own logits select."""
    target: int = 0
    """Clean forward that the attack needs (TRADES)."""
    shared: bool = False
    """Whether the forward that selects is also the attack's target."""
    step: float = 2
    """One attack step: forward, and backward to the input."""
    clean: int = 3
    """Update on the clean example; 0 where the loss has no clean term."""
    corrupted: int = 3
    """Update on the corrupted example (AugMix: its two views)."""
    untouched: int = 0
    """The same for an example that got no steps: 0 where its clean logits stand in."""
    penalty: int = 0
    """A term of the loss that has to see the network itself (GradAlign)."""

    def work(self, *, steps: float, touched: float, examples: int = 1, selects: bool = True) -> Work:
        """Passes for ``examples`` of which ``touched`` got ``steps`` altogether.

        With one example and average fractions this is the expected work an example.
        """
        aimed = steps and not (selects and self.shared)
        return Work(
            examples=examples,
            selection=self.selection * examples if selects else 0,
            attack=(self.target * examples if aimed else 0) + self.step * steps,
            update=(self.clean + self.penalty) * examples
            + self.corrupted * touched
            + self.untouched * (examples - touched),
        )

    def speedup(
        self, budget: StepBudget, *, boundary: float, robust: float, outlier: float, steps: int | None = None
    ) -> float:
        """Plain work, with ``steps`` (N_B unless given) for everyone, over that of ``budget`` at these fractions."""
        full = budget.boundary if steps is None else check_count(steps, "steps")
        parts = ((boundary, budget.boundary), (robust, budget.robust), (outlier, budget.outlier))
        plain = self.work(steps=full, touched=1, selects=False)
        mined = self.work(
            steps=sum(share * n for share, n in parts),
            touched=sum(share for share, n in parts if n),
            selects=budget.uniform_steps is None,
        )
        return plain.total / mined.total
