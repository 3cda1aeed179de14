"""The static buffers of the group engine."""

from __future__ import annotations

import torch
from torch import Tensor


class Memory:
    """The static buffers of a group of up to ``rows`` examples in mini-batches of up to ``m``.

    Args:
        x, start: one mini-batch's examples, and what its corruption starts from, for their shapes.
        copies: corrupted copies of each example.
    """

    def __init__(
        self, x: Tensor, start: Tensor, rows: int, m: int, *, classes: int, batches: int, copies: int = 1
    ) -> None:
        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=x.device)

        floating = torch.float64 if x.dtype == torch.float64 else torch.float32
        # In the order in which the examples came: as they are, where their corruption starts, corrupted.
        self.x, self.start, self.y = like(x, rows), like(start, rows), numbers(rows)
        self.prime = like(x, copies * rows).view(copies, rows, *x.shape[1:])
        self.category, self.steps, self.svar = numbers(rows), numbers(rows), numbers(rows, dtype=floating)
        self.selected = numbers(rows)  # categories before sizes were rounded
        self.step_size = numbers(rows, dtype=x.dtype)
        self.index = numbers(rows)  # which of all examples they are, where that is asked for
        # The rows, those with the most steps first. Of each mini-batch: its examples with steps, then the others.
        self.order, self.local = numbers(rows), numbers(rows)
        # What the host reads.
        self.counts = numbers(2 + max(batches, rows // max(m, 1)))
        # Where the mini-batch whose update is next begins, and what came of it.
        self.at, self.loss = numbers(), numbers(dtype=floating)
        self.z = numbers(m, classes, dtype=floating)
        self.z_prime = numbers(*([copies] if copies > 1 else []), m, classes, dtype=floating)

    def corrupted(self, rows: slice) -> Tensor:
        """x' of some rows, (n, …) or (copies, n, …), as an objective has it."""
        return self.prime[0, rows] if len(self.prime) == 1 else self.prime[:, rows]

    def too_small(self, x: Tensor, start: Tensor, rows: int, m: int, batches: int) -> bool:
        """Whether a group of this size needs larger buffers, or others."""
        other = any(
            new.shape[1:] != mine.shape[1:] or new.dtype != mine.dtype or new.device != mine.device
            for new, mine in ((x, self.x), (start, self.start))
        )
        return other or rows > len(self.y) or m > len(self.z) or 2 + batches > len(self.counts)


def like(x: Tensor, n: int) -> Tensor:
    """Zeros for ``n`` examples like those of ``x``, laid out in memory alike."""
    zeros = torch.zeros((n, *x.shape[1:]), dtype=x.dtype, device=x.device)
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return zeros.contiguous(memory_format=torch.channels_last)
    return zeros


def take(images: Tensor, rows: Tensor) -> Tensor:
    """Some of the images, laid out in memory as all of them are; `index_select` would forget channels_last."""
    if images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last):
        return images.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
    return images.index_select(0, rows)


def some(values: Tensor, rows: Tensor | None) -> Tensor:
    """These rows, or all."""
    return values if rows is None else take(values, rows)
