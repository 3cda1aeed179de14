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
        self.target = numbers(rows, classes, dtype=floating)
        # In the order of the attack.
        self.order, self.clean, self.adv, self.labels = numbers(rows), images(rows), images(rows), numbers(rows)
        self.goal = numbers(rows, classes, dtype=floating)
        self.size = numbers(rows, *(1,) * (x.ndim - 1), dtype=x.dtype)
        # Of each mini-batch: its examples with steps, then the others. And what the host reads.
        self.local, self.counts = numbers(rows), numbers(2 + max(batches, rows // max(m, 1)))
        # The mini-batch whose update is next, and what came of it.
        self.batch_x, self.batch_prime, self.batch_y, self.batch_rows = images(m), images(m), numbers(m), numbers(m)
        self.batch_category, self.batch_steps = numbers(m), numbers(m)
        self.batch_svar = numbers(m, dtype=floating)
        self.loss = numbers(dtype=floating)
        self.z, self.z_prime = numbers(m, classes, dtype=floating), numbers(m, classes, dtype=floating)

    def too_small(self, x: Tensor, rows: int, m: int, batches: int) -> bool:
        """Whether a group of this size needs larger buffers, or others."""
        other = x.shape[1:] != self.x.shape[1:] or x.dtype != self.x.dtype or x.device != self.x.device
        return other or rows > len(self.y) or m > len(self.batch_y) or 2 + batches > len(self.counts)
