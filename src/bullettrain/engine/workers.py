"""Several processes as one: the joint batch of a module wrapped in DistributedDataParallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Workers:
    """The processes that share a step; one alone where the model is not wrapped."""

    def __init__(self, model: nn.Module, y: Tensor) -> None:
        inner = getattr(model, "_orig_mod", model)
        self.group: dist.ProcessGroup | None = None
        self.sizes = [len(y)]
        """Examples of each worker."""
        if isinstance(inner, nn.parallel.DistributedDataParallel):
            self.group = inner.process_group
            size = torch.tensor([len(y)], device=y.device)
            sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(sizes, size, group=self.group)
            self.sizes = [int(n) for n in sizes]

    @property
    def loss_weight(self) -> float:
        """Makes the mean of the workers' losses the joint batch's: this worker's share of it × their number."""
        mine = 0 if self.group is None else dist.get_rank(self.group)
        return self.sizes[mine] * len(self.sizes) / sum(self.sizes)

    def gather(self, values: Tensor) -> tuple[Tensor, slice]:
        """``values`` (m,) of every worker in rank order, and where this worker's own stand among them."""
        if self.group is None:
            return values, slice(0, len(values))
        padded = values.new_zeros(max(self.sizes))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in self.sizes]
        dist.all_gather(parts, padded, group=self.group)
        before = sum(self.sizes[: dist.get_rank(self.group)])
        joint = torch.cat([part[:n] for part, n in zip(parts, self.sizes, strict=True)])
        return joint, slice(before, before + len(values))
