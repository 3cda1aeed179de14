"""The joint batch of a process group. Collectives run between phases, never inside a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from bullettrain.brief import first_line


def find_group(group: dist.ProcessGroup | None, joint: bool) -> dist.ProcessGroup | None:
    """Return the processes that share a mini-batch: ``group``, or the default group; None: only this process."""
    if not joint or not dist.is_available() or not dist.is_initialized():
        return None
    group = group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


class JointBatches:
    """The mini-batches of a step, each together with the examples that other processes have of it.

    Args:
        group: result of :func:`find_group`; None: only this process.
        sizes: number of examples that this process has of each mini-batch.
        device: device of the collectives.
        checksum: of the weights, see :func:`checksum`; 0: not computed. Processes with different ones are warned of.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, sizes: Sequence[int], device: torch.device, checksum: int = 0
    ) -> None:
        self.group, self.rank = group, 0 if group is None else dist.get_rank(group)
        self.sizes_by_rank = [list(sizes)]
        """Number of examples of each mini-batch, by process."""
        if group is not None:
            mine = torch.tensor([*sizes, checksum], device=device)
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            with collective():
                dist.all_gather(parts, mine, group=group)
            rows: list[list[int]] = [part.tolist() for part in parts]
            self.sizes_by_rank = [row[:-1] for row in rows]
            if len({row[-1] for row in rows} - {0}) > 1:
                why = "the processes of the group have different weights, so gradients are not averaged"
                mend = "wrap the network in DistributedDataParallel, or give joint=False if that is meant"
                warnings.warn(f"{why}; {mend}", stacklevel=4)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of examples of each mini-batch over all processes."""
        return tuple(sum(several) for several in zip(*self.sizes_by_rank, strict=True))

    @property
    def local_sizes(self) -> list[int]:
        """Number of examples that this process has of each mini-batch."""
        return self.sizes_by_rank[self.rank]

    def loss_weight(self, batch: int) -> float:
        """Return the weight that makes the mean of the processes' losses the loss of the joint batch."""
        return self.local_sizes[batch] * len(self.sizes_by_rank) / self.sizes[batch]

    @property
    def local_ranges(self) -> tuple[tuple[int, int], ...]:
        """Where this process's examples begin and end in the joint mini-batches, which are in rank order."""
        where, at = [], 0
        for i, total in enumerate(self.sizes):
            before = at + sum(self.sizes_by_rank[rank][i] for rank in range(self.rank))
            where.append((before, before + self.local_sizes[i]))
            at += total
        return tuple(where)

    def gather(self, values: Tensor | None, batch: int | None = None) -> Tensor | None:
        """Return ``values`` (R,) of consecutive mini-batches, or of the one ``batch``, of all processes, joined."""
        if self.group is None or values is None:
            return values
        sizes_by_rank = self.sizes_by_rank if batch is None else [[sizes[batch]] for sizes in self.sizes_by_rank]
        padded = values.new_zeros(max(map(sum, sizes_by_rank)))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in sizes_by_rank]
        with collective():
            dist.all_gather(parts, padded, group=self.group)
        split = [torch.split(part[: sum(n)], n) for part, n in zip(parts, sizes_by_rank, strict=True)]
        return torch.cat([split[rank][i] for i in range(len(sizes_by_rank[0])) for rank in range(len(split))])

    def sum_(self, values: Tensor) -> Tensor:
        """Sum ``values`` over the processes, in place."""
        if self.group is not None:
            with collective():
                dist.all_reduce(values, group=self.group)
        return values


def checksum(weights: Iterable[Tensor]) -> int:
    """Return a number that differs, but for a freak, if any bit of the weights does; synchronises with the device."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [w.detach().view(kinds[w.element_size()]).sum(dtype=torch.int64) for w in weights if w.numel()]
    return int(torch.stack([s.to(sums[0].device) for s in sums]).sum()) or 1 if sums else 0


@contextmanager
def collective() -> Iterator[None]:
    """Let the error of a collective say that another process may have ended."""
    try:
        yield
    except RuntimeError as error:
        ended = "mostly because another process of the group has ended, whose output then has the first error"
        raise RuntimeError(f"a collective failed ({first_line(error)}), {ended}") from error


def average_gradients(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Average gradients over the processes, in place, by one all-reduce of a flat tensor."""
    if group is None or not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    with collective():
        dist.all_reduce(flat, group=group)
    _unflatten(flat / dist.get_world_size(group), gradients)


@torch.no_grad()
def share(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Copy the floating-point tensors of the first process to the others, as DistributedDataParallel does."""
    if group is None:
        return
    tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        with collective():
            dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
        _unflatten(flat, alike)


def _unflatten(flat: Tensor, into: Sequence[Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in into])
    torch._foreach_copy_(list(into), [part.view_as(tensor) for part, tensor in zip(parts, into, strict=True)])
