"""Which rows get how many steps when a group of mini-batches is attacked at once, in sizes that repeat.

Rows with few steps take them one after the other in the place of one row with many, so that every iteration of the
attack has the same size. Sizes are rounded up to a multiple of the bucket, and only towards more care: what room that
gives goes to robust examples of the lowest SVar, which join the boundary. A bucket of 1 is the exact rule. All of it
but :class:`Plan`, which is what the host reads, is computed without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bullettrain.allocation import StepBudget
from bullettrain.mining import Category


@dataclass(frozen=True)
class Plan:
    """How a group is attacked: its first rows, in the order of :func:`arrange`, get the most steps."""

    boundary: int
    """Rows with N_B steps."""
    robust: int
    """Rows with at least N_R steps."""
    touched: tuple[int, ...]
    """Examples with steps, of each mini-batch."""
    total: int
    """Rows there are."""
    budget: StepBudget
    bucket: int = 1
    """Rows under attack are a multiple of this, or all; 1 where all get the same steps."""
    fresh: int = 0
    """The last steps of each row, which are taken elsewhere."""

    @property
    def rows(self) -> int:
        """Rows with steps at all."""
        return sum(self.touched)

    @property
    def iterations(self) -> int:
        """Of the group's attack."""
        return self.budget.boundary - self.fresh if self.rows else 0

    @cached_property
    def schedule(self) -> list[int]:
        """Rows under attack at each iteration; what fills a bucket up stands idle."""
        levels = steps_of_levels(self.budget, self.fresh)
        rows = (self.boundary, self.robust - self.boundary, self.rows - self.robust)
        steps = sum(n * each for n, each in zip(rows, levels, strict=True))
        slots = [-(-(steps - t) // self.iterations) for t in range(self.iterations)]
        return [min(-(-n // self.bucket) * self.bucket, self.total) for n in slots if n > 0]

    @classmethod
    def read(cls, counts: Sequence[int], sizes: Sequence[int], budget: StepBudget, bucket: int, fresh: int = 0) -> Plan:
        """The plan from the counts of :func:`arrange`."""
        return cls(counts[0], counts[1], tuple(counts[2:]), sum(sizes), budget, coarse(bucket, len(sizes)), fresh)

    @classmethod
    def uniform(cls, sizes: Sequence[int], budget: StepBudget, fresh: int = 0) -> Plan:
        """The same steps for everyone."""
        total = sum(sizes)
        return cls(total, total, tuple(sizes) if budget.boundary else (0,) * len(sizes), total, budget, fresh=fresh)


def coarse(bucket: int, batches: int) -> int:
    """The bucket of a whole group: it grows with the group, so that a long one does not have many more sizes."""
    return max(bucket, bucket * batches // 2) if bucket > 1 else 1


def steps_of_levels(budget: StepBudget, fresh: int) -> tuple[int, int, int]:
    """Steps of a boundary, a robust and an outlier row in a group's attack: their budgets, but for the fresh ones."""
    most, middle, least = (max(n - fresh, 0) for n in (budget.boundary, budget.robust, budget.outlier))
    return most, middle, least


def arrange(
    category: Tensor, svar: Tensor, sizes: Sequence[int], budget: StepBudget, bucket: int, fresh: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Order a group for its attack.

    Args:
        category, svar: (R,) of k mini-batches one after the other.
        sizes: their k sizes, which add up to R.
        budget: N_B ≥ N_R ≥ N_O.
        bucket: examples with steps are rounded up to a multiple of it by mini-batch, the rows under attack to a
            multiple of :func:`coarse`; the boundary is extended as far as that leaves room.
        fresh: the last steps of each row, which are taken elsewhere.

    Returns:
        order: (R,) rows, those with the most steps first.
        local: (R,) for each mini-batch, where its examples with steps are, in their own order, then the others.
        counts: (2 + k,) rows with N_B steps, with at least N_R steps, then examples with steps of each mini-batch.
    """
    outlier = category == Category.OUTLIER
    rank = torch.where(outlier, 2, torch.where(category == Category.ROBUST, 1, 0))
    # Nearest to the more careful class first: robust by rising SVar, outliers from 0 downwards.
    nearness = torch.where(outlier, -svar, svar)
    ranks_with_steps = 1 + (budget.robust > 0) + (budget.outlier > 0)
    device, every = rank.device, torch.arange(len(rank), device=rank.device)
    if len(set(sizes)) == 1:  # which mini-batch, and where it begins
        of, begins = every // sizes[0], every // sizes[0] * sizes[0]
    else:
        of = torch.cat([torch.full((size,), i, device=device) for i, size in enumerate(sizes)])
        begins = torch.cat([torch.full((size,), sum(sizes[:i]), device=device) for i, size in enumerate(sizes)])
    per_batch = torch.zeros(len(sizes), dtype=torch.int64, device=device)

    care = nearness.argsort(stable=True)
    care = care[rank[care].argsort(stable=True)]  # by rank, among equals by nearness
    place = torch.empty_like(care)  # of each row among its mini-batch's, by care
    place[care[of[care].argsort(stable=True)]] = every - begins
    touched = _rounded(per_batch.index_add(0, of, (rank < ranks_with_steps).long()), bucket)
    touched = torch.minimum(touched, per_batch.index_add(0, of, torch.ones_like(of)))
    has_steps = place < touched[of]
    local = (2 * of + (~has_steps).long()).argsort(stable=True) - begins
    level = torch.where(has_steps, rank if budget.robust else 0, 3)
    order = care[level[care].argsort(stable=True)]

    rows = boundary = robust = touched.sum()
    if budget.robust:  # else only the boundary has steps, and was rounded by mini-batch
        boundary = torch.minimum((rank < 1).sum(), rows)
    if budget.outlier:
        robust = torch.minimum((rank < 2).sum(), rows)
    robust = torch.maximum(boundary, robust)
    if bucket > 1 and budget.robust and budget.boundary > fresh:
        steps = _by_place(every, boundary, robust, rows, steps_of_levels(budget, fresh))
        iterations = budget.boundary - fresh
        slots = _rounded(steps.sum(), iterations) // iterations
        room = (_rounded(slots, coarse(bucket, len(sizes))).clamp_max(len(rank)) - slots) * iterations
        extra = torch.where(every < rows, iterations - steps, room + 1).cumsum(0)  # steps to bring so many to the top
        boundary = torch.maximum(boundary, torch.minimum((extra <= room).sum(), (rank < 2).sum()))
        robust = torch.maximum(boundary, robust)
    return order, local, torch.cat([torch.stack([boundary, robust]), touched])


def turns(counts: Tensor, rows: int, budget: StepBudget, fresh: int) -> Tensor:
    """Who is under attack when: (iterations, R), rows in the order of :func:`arrange`; R is nobody.

    The steps of all rows stand in one line, row after row, and are dealt out to places that have room for as many
    steps as there are iterations. So a row never meets itself, as none has more steps than that.

    Args:
        counts: (2 + k,) of :func:`arrange`.
        rows: R.
        budget, fresh: steps.
    """
    iterations, place = budget.boundary - fresh, torch.arange(rows, device=counts.device)
    ends = _by_place(place, counts[0], counts[1], counts[2:].sum(), steps_of_levels(budget, fresh)).cumsum(0)
    line = place * iterations + torch.arange(iterations, device=counts.device)[:, None]
    return torch.searchsorted(ends, line, right=True)


def allot(
    counts: Tensor, category: Tensor, budget: StepBudget, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """What each row of the order gets.

    Args:
        counts: (2 + k,) of :func:`arrange`.
        category: (R,) what each row was found to be, in that order.
        budget, eps: steps and step sizes.
        dtype: of the step sizes.

    Returns:
        category (R,) as it is treated: examples without steps stay what they were; steps (R,); step sizes (R,).
    """
    place = torch.arange(len(category), device=category.device)
    level = (place >= counts[0]).long() + (place >= counts[1]).long() + (place >= counts[2:].sum()).long()
    treated = torch.where(level == 0, int(Category.BOUNDARY), int(Category.ROBUST))
    treated = torch.where(level == 2, int(Category.OUTLIER), treated)
    treated = torch.where(level == 3, category, treated)
    steps = torch.where(level == 3, 0, budget.allocate(treated))
    return treated, steps, torch.where(level == 3, 0.0, budget.step_sizes(treated, steps, eps)).to(dtype)


def _by_place(place: Tensor, boundary: Tensor, robust: Tensor, rows: Tensor, steps: tuple[int, int, int]) -> Tensor:
    """(R,) steps of each row of the order, whose first ``boundary`` get the most."""
    outlier = torch.where(place < rows, steps[2], 0)
    return torch.where(place < boundary, steps[0], torch.where(place < robust, steps[1], outlier))


def _rounded(n: Tensor, bucket: int) -> Tensor:
    return (n + bucket - 1) // bucket * bucket
