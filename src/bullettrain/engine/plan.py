"""Which rows get how many steps when a group of mini-batches is attacked at once, in sizes that repeat.

Sizes are rounded up to a multiple of the bucket, and only towards more care: robust examples of the lowest SVar
join the boundary, outliers nearest to the boundary join the robust. A bucket of 1 is the exact rule. All of it but
:class:`Plan`, which is what the host reads, is computed without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Rows under attack are a multiple of this, or all."""

    @property
    def rows(self) -> int:
        """Rows with steps at all."""
        return sum(self.touched)

    @property
    def schedule(self) -> list[int]:
        """Rows under attack at each iteration. To fill a bucket, rows without steps stand idle in it."""
        budget = self.budget
        levels = ((self.boundary, budget.boundary), (self.robust, budget.robust), (self.rows, budget.outlier))
        rows = [max((up_to for up_to, steps in levels if steps > t), default=0) for t in range(budget.boundary)]
        return [min(-(-n // self.bucket) * self.bucket, self.total) for n in rows if n]

    @classmethod
    def read(cls, counts: Sequence[int], sizes: Sequence[int], budget: StepBudget, bucket: int) -> Plan:
        """The plan from the counts of :func:`arrange`."""
        return cls(counts[0], counts[1], tuple(counts[2:]), sum(sizes), budget, coarse(bucket, len(sizes)))

    @classmethod
    def uniform(cls, sizes: Sequence[int], budget: StepBudget) -> Plan:
        """The same steps for everyone."""
        total = sum(sizes)
        return cls(total, total, tuple(sizes) if budget.boundary else (0,) * len(sizes), total, budget)


def coarse(bucket: int, batches: int) -> int:
    """The bucket of a whole group: as many sizes as one mini-batch has, whatever its length."""
    return bucket * batches if bucket > 1 else 1


def arrange(
    category: Tensor, svar: Tensor, sizes: Sequence[int], budget: StepBudget, bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Order a group for its attack.

    Args:
        category, svar: (R,) of k mini-batches one after the other.
        sizes: their k sizes, which add up to R.
        budget: N_B ≥ N_R ≥ N_O.
        bucket: examples with steps are rounded up to a multiple of it by mini-batch, classes of the group to a
            multiple of :func:`coarse`.

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
        boundary = torch.minimum(_rounded((rank < 1).sum(), coarse(bucket, len(sizes))), rows)
    if budget.outlier:
        robust = torch.minimum(_rounded((rank < 2).sum(), coarse(bucket, len(sizes))), rows)
    return order, local, torch.cat([torch.stack([boundary, torch.maximum(boundary, robust)]), touched])


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


def _rounded(n: Tensor, bucket: int) -> Tensor:
    return (n + bucket - 1) // bucket * bucket
