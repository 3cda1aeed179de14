"""Which images survive: rounds of attacks, each on what the rounds before have left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from bullettrain.data import ImageSet, to_unit
from bullettrain.data.base import derive_seed

Tick = Callable[[int], None]
"""Told after each batch how many passes it took: of the clean round and of PGD, its images."""


@dataclass(frozen=True)
class Round:
    """One look at the images: as they are, one restart of an attack, or one attack of an ensemble."""

    name: str
    survives: Callable[[Tensor, Tensor, int], Tensor]
    """``survives(x (m, C, H, W), y (m,), seed) -> (m,)`` bool: which of a batch the round does not break."""
    passes: int = 1
    """What an image costs, relative to other rounds."""
    even: bool = False
    """Whether batches are all of nearly one size, which is at most the one that is asked for."""

    def size(self, images: int, batch_size: int) -> int:
        """Images in a batch where there are so many in all."""
        return -(-images // max(-(-images // batch_size), 1)) if self.even else batch_size


@dataclass
class Survival:
    """How far an attack has come: enough to go on from between any two batches.

    ``alive`` (n,) bool, on the CPU: images that are classified correctly so far. ``pending`` (n,): those that
    the round under way began with, in batches of which ``batches`` are done.
    """

    alive: Tensor
    pending: Tensor
    batches: int = 0
    shares: list[float] = field(default_factory=list)
    """Share of all images alive after each finished round."""

    @classmethod
    def fresh(cls, n: int) -> Survival:
        """Nothing has been looked at yet."""
        return cls(torch.ones(n, dtype=torch.bool), torch.ones(n, dtype=torch.bool))

    @classmethod
    def after_clean(cls, alive: Tensor) -> Survival:
        """A first round, the images as they are, is done and has left ``alive`` (n,)."""
        return cls(alive.clone(), alive.clone(), shares=[int(alive.sum()) / len(alive)])

    @property
    def share(self) -> float:
        """Share of all images that are alive."""
        return int(self.alive.sum()) / len(self.alive)

    def left(self, rounds: Sequence[Round], batch_size: int) -> int:
        """Passes, at most, until the last of ``rounds`` is done: what a progress bar needs."""
        if len(self.shares) == len(rounds):
            return 0
        now, *later = rounds[len(self.shares) :]
        pending = int(self.pending.sum())
        begun = max(pending - self.batches * now.size(pending, batch_size), 0)
        return begun * now.passes + sum(part.passes for part in later) * int(self.alive.sum())


def survive(
    rounds: Sequence[Round],
    data: ImageSet,
    *,
    device: torch.device,
    batch_size: int = 500,
    seed: int = 0,
    channels_last: bool = False,
    state: Survival | None = None,
    tick: Tick | None = None,
    saved: Callable[[Survival], None] | None = None,
) -> Survival:
    """Put ``data`` through ``rounds``; what a round breaks is not attacked again.

    The survivors of all batches fill the batches of the next round, so that they stay full. A batch's seed
    depends on ``seed``, its round and its place alone. Several processes take turns at the batches.

    Args:
        rounds: in order; all of them see the same seed, their own number and batch number.
        data: n images.
        device: where they are attacked.
        batch_size: images at once.
        seed: of all noise.
        channels_last: how images lie in memory.
        state: to go on from; it is changed. None: from the start.
        tick: called after each batch.
        saved: called with the state after each batch and each round, so that it can be kept.

    Returns:
        The state after the last round.
    """
    state = state or Survival.fresh(len(data))
    together = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    for number in range(len(state.shares), len(rounds)):
        rows = state.pending.nonzero()[:, 0]
        size = rounds[number].size(len(rows), batch_size)
        for index in range(state.batches, -(-len(rows) // max(size, 1))):
            part = rows[index * size : (index + 1) * size]
            if index % world == rank:
                x = to_unit(data.images[part].to(device), channels_last=channels_last)
                y = data.labels[part].to(device)
                survived = rounds[number].survives(x, y, derive_seed(seed, number, index))
                state.alive[part] = survived.to("cpu", torch.bool)
            state.batches = index + 1
            if saved is not None:
                saved(state)
            if tick is not None:
                tick(len(part) * rounds[number].passes)
        if together:
            alive = state.alive.to(device, torch.uint8)
            dist.all_reduce(alive, op=dist.ReduceOp.MIN)
            state.alive = alive.to("cpu", torch.bool)
        state.shares.append(state.share)
        state.pending, state.batches = state.alive.clone(), 0
        if saved is not None:
            saved(state)
    return state
