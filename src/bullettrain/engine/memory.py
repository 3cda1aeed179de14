"""The static buffers of the group engine."""

from __future__ import annotations

import torch
from torch import Tensor


class Memory:
    """The static buffers of a group of up to ``rows`` examples in mini-batches of up to ``m``."""

    def __init__(self, x: Tensor, rows: int, m: int, classes: int, batches: int) -> None:
        form = torch.contiguous_format
        if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
            form = torch.channels_last

        def images(n: int) -> Tensor:
            return torch.zeros((n, *x.shape[1:]), dtype=x.dtype, device=x.device).contiguous(memory_format=form)

        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=x.device)

        floating = torch.float64 if x.dtype == torch.float64 else torch.float32
        # In the order in which the examples came: as they are, where attacks start, corrupted.
        self.x, self.start, self.prime, self.y = images(rows), images(rows), images(rows), numbers(rows)
        self.category, self.steps, self.svar = numbers(rows), numbers(rows), numbers(rows, dtype=floating)
        self.step_size = numbers(rows, dtype=x.dtype)
        # In the order of the attack.
        self.order, self.clean, self.adv, self.labels = numbers(rows), images(rows), images(rows), numbers(rows)
        self.goal = numbers(rows, classes, dtype=floating)
        self.size = numbers(rows, *(1,) * (x.ndim - 1), dtype=x.dtype)
        # Of each mini-batch: its examples with steps, then the others. And what the host reads.
        self.local, self.counts = numbers(rows), numbers(2 + max(batches, rows // max(m, 1)))
        # Where the mini-batch whose update is next begins, and what came of it.
        self.at, self.loss = numbers(), numbers(dtype=floating)
        self.z, self.z_prime = numbers(m, classes, dtype=floating), numbers(m, classes, dtype=floating)

    def too_small(self, x: Tensor, rows: int, m: int, batches: int) -> bool:
        """Whether a group of this size needs larger buffers, or others."""
        other = x.shape[1:] != self.x.shape[1:] or x.dtype != self.x.dtype or x.device != self.x.device
        return other or rows > len(self.y) or m > len(self.z) or 2 + batches > len(self.counts)


def take(images: Tensor, rows: Tensor) -> Tensor:
    """Some of the images, laid out in memory as all of them are; `index_select` would forget channels_last."""
    if images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last):
        return images.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
    return images.index_select(0, rows)
