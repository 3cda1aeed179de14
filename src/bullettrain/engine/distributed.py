"""Several processes as one: the joint batch of a process group. Collectives stand between phases, never in a graph."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from bullettrain.brief import first_line


def find_group(group: dist.ProcessGroup | None, joint: bool) -> dist.ProcessGroup | None:
    """The processes whose mini-batches are one: those of ``group``, or all there are; None: this one alone."""
    if not joint or not dist.is_available() or not dist.is_initialized():
        return None
    group = group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


class Workers:
    """The processes that share the steps of some mini-batches.

    Args:
        group: of :func:`find_group`; None: this one alone.
        sizes: examples that this process has of each mini-batch.
        device: where collectives run.
    """

    def __init__(self, group: dist.ProcessGroup | None, sizes: Sequence[int], device: torch.device) -> None:
        self.group, self.rank = group, 0 if group is None else dist.get_rank(group)
        self.sizes = [list(sizes)]
        """By process: examples of each mini-batch."""
        if group is not None:
            mine = torch.tensor(sizes, device=device)
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            with collective():
                dist.all_gather(parts, mine, group=group)
            self.sizes = [part.tolist() for part in parts]

    @property
    def joint_sizes(self) -> tuple[int, ...]:
        """Examples of each mini-batch over all processes."""
        return tuple(sum(several) for several in zip(*self.sizes, strict=True))

    def loss_weight(self, batch: int) -> float:
        """Makes the mean of the processes' losses the joint batch's: this one's share of it × their number."""
        return self.sizes[self.rank][batch] * len(self.sizes) / self.joint_sizes[batch]

    @property
    def own_places(self) -> tuple[tuple[int, int], ...]:
        """Where this process's examples begin and end among those of the joint mini-batches, in rank order in each."""
        where, at = [], 0
        for i, total in enumerate(self.joint_sizes):
            before = at + sum(self.sizes[rank][i] for rank in range(self.rank))
            where.append((before, before + self.sizes[self.rank][i]))
            at += total
        return tuple(where)

    @property
    def shares(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """:attr:`joint_sizes`, and this process's own places among them."""
        return self.joint_sizes, self.own_places

    def gather(self, values: Tensor | None) -> Tensor | None:
        """``values`` (R,) of mini-batches one after the other, as those of the joint ones."""
        if self.group is None or values is None:
            return values
        own = self.sizes[self.rank]
        padded = values.new_zeros(max(sum(sizes) for sizes in self.sizes))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in self.sizes]
        with collective():
            dist.all_gather(parts, padded, group=self.group)
        split = [torch.split(part[: sum(n)], n) for part, n in zip(parts, self.sizes, strict=True)]
        return torch.cat([split[rank][i] for i in range(len(own)) for rank in range(len(split))])

    def gather_batch(self, values: Tensor | None, batch: int) -> Tensor | None:
        """``values`` (m,) of one mini-batch, as those of the joint one."""
        one = copy.copy(self)
        one.sizes = [[sizes[batch]] for sizes in self.sizes]
        return one.gather(values)

    def sum_(self, values: Tensor) -> Tensor:
        """``values`` summed over the processes, in place."""
        if self.group is not None:
            with collective():
                dist.all_reduce(values, group=self.group)
        return values


@contextmanager
def collective() -> Iterator[None]:
    """Around a collective: another process that has ended is an error that says so."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "another process of the group has ended, or cannot be reached, so this one ends too; the first error is in "
            f"that process's output ({first_line(error)})"
        ) from error


def average_gradients(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Gradients as their mean over the processes, in place, by one collective of one flat tensor."""
    if group is None or not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    with collective():
        dist.all_reduce(flat, group=group)
    _unflatten(flat / dist.get_world_size(group), gradients)


@torch.no_grad()
def share_buffers(model: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    """Batch-norm statistics of the first process for all, before a step, as DistributedDataParallel has it."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if group is None or not buffers:
        return
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    with collective():
        dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
    _unflatten(flat, buffers)


def _unflatten(flat: Tensor, into: Sequence[Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in into])
    torch._foreach_copy_(list(into), [part.view_as(tensor) for part, tensor in zip(parts, into, strict=True)])
