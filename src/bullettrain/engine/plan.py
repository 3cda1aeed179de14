"""Which rows get how many steps when a group of mini-batches is attacked at once, in sizes that repeat.

Sizes are rounded up to a multiple of the bucket, and only towards more care: robust examples of the lowest SVar
join the boundary, outliers nearest to the boundary join the robust. A bucket of 1 is the exact rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bullettrain.allocation import StepBudget
from bullettrain.mining import Category


def round_up(n: int, bucket: int, limit: int) -> int:
    """The next multiple of ``bucket``, at most ``limit``."""
    return min(-(-n // bucket) * bucket, limit)


@dataclass(frozen=True)
class Plan:
    """How a group is attacked: its first rows, in the order of :func:`arrange`, get the most steps."""

    boundary: int
    """Rows with N_B steps."""
    robust: int
    """Rows with at least N_R steps."""
    touched: tuple[int, ...]
    """Examples with steps, of each mini-batch."""
    budget: StepBudget

    @property
    def rows(self) -> int:
        """Rows with steps at all."""
        return sum(self.touched)

    @property
    def levels(self) -> tuple[tuple[int, int, Category], ...]:
        """(rows up to here, their steps, what they are), most careful first."""
        budget = self.budget
        return (
            (self.boundary, budget.boundary, Category.BOUNDARY),
            (self.robust, budget.robust, Category.ROBUST),
            (self.rows, budget.outlier, Category.OUTLIER),
        )

    @property
    def schedule(self) -> list[int]:
        """Rows under attack at each iteration."""
        levels = self.levels
        rows = [max((up_to for up_to, steps, _ in levels if steps > t), default=0) for t in range(self.budget.boundary)]
        return [n for n in rows if n]

    @classmethod
    def read(cls, counts: Sequence[int], sizes: Sequence[int], budget: StepBudget, bucket: int) -> Plan:
        """The plan from what :func:`arrange` counted: boundary, boundary and robust, then touched by mini-batch."""
        touched = tuple(counts[2:])
        rows = sum(touched)
        if not budget.robust:  # only the boundary has steps, and was rounded by mini-batch
            return cls(rows, rows, touched, budget)
        boundary = round_up(counts[0], bucket, rows)
        robust = round_up(counts[1], bucket, rows) if budget.outlier else rows
        return cls(boundary, max(robust, boundary), touched, budget)

    @classmethod
    def uniform(cls, sizes: Sequence[int], budget: StepBudget) -> Plan:
        """The same steps for everyone."""
        return cls(sum(sizes), sum(sizes), tuple(sizes) if budget.boundary else (0,) * len(sizes), budget)


def arrange(
    category: Tensor, svar: Tensor, sizes: Sequence[int], budget: StepBudget, bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Order a group for its attack, without waiting for the device.

    Args:
        category, svar: (R,) of k mini-batches one after the other.
        sizes: their k sizes, which add up to R.
        budget: N_B ≥ N_R ≥ N_O.
        bucket: sizes are rounded up to a multiple of it.

    Returns:
        order: (R,) rows, those with the most steps first.
        local: (R,) for each mini-batch, where its examples with steps are, in their own order, then the others.
        counts: (2 + k,) boundary, boundary and robust, then examples with steps of each mini-batch.
    """
    outlier = category == Category.OUTLIER
    rank = torch.where(outlier, 2, torch.where(category == Category.ROBUST, 1, 0))
    # Nearest to the more careful class first: robust by rising SVar, outliers from 0 downwards.
    nearness = torch.where(outlier, -svar, svar)
    ranks_with_steps = 1 + (budget.robust > 0) + (budget.outlier > 0)
    chosen, local, touched = [], [], []
    at = 0
    for size in sizes:
        part = slice(at, at + size)
        care = _sorted_by(rank[part], nearness[part])
        place = torch.empty_like(care).scatter_(0, care, torch.arange(size, device=care.device))
        exact = (rank[part] < ranks_with_steps).sum()
        number = ((exact + bucket - 1) // bucket * bucket).clamp_max(size)
        chosen.append(place < number)
        local.append((place >= number).to(torch.int64).argsort(stable=True))
        touched.append(number)
        at += size
    has_steps = torch.cat(chosen)
    level = torch.where(has_steps, rank if budget.robust else 0, 3)
    counts = torch.stack([(rank < 1).sum(), (has_steps & (rank < 2)).sum(), *touched])
    return _sorted_by(level, nearness), torch.cat(local), counts


def _sorted_by(first: Tensor, second: Tensor) -> Tensor:
    """Indices that sort by ``first`` and, among equals, by ``second``; stable."""
    order = second.argsort(stable=True)
    return order[first[order].argsort(stable=True)]
