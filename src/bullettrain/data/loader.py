"""Batches on the device: from one resident tensor when it fits, from the host's memory when not.

Every batch is a function of (seed, epoch, batch index) alone. So a run resumes in the middle of an epoch,
several processes cut the same joint batch into shares, and whether the data fits changes no batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bullettrain.augmix import ViewMaker
from bullettrain.data.augment import Augment, Draws, to_unit
from bullettrain.data.base import DataError, ImageSet, derive_seed

RESIDENT_SHARE = 0.4  # of the free device memory: the network and its activations need the rest
VIEWED_AT_ONCE = 1 << 22  # pixels on a GPU, 1,365 of CIFAR's: what surrounds their kernel costs the same for few


class Loader:
    """Batches of `data`, epoch by epoch.

    batch_size is the joint batch over all `world` processes; process `rank` gets its contiguous share of
    each, near-equal in size (and empty, where a last batch is smaller than the world, so that every process
    takes the same number of steps). Each batch comes `replays` times in a row. With `views` images come as one
    AugMix view of themselves: all of them, or the share `view_share`, drawn anew in every epoch. resident=None puts the
    images on the device when they take up at most 40 % of its free memory.
    """

    def __init__(
        self,
        data: ImageSet,
        *,
        batch_size: int,
        seed: int,
        device: torch.device | str = "cpu",
        augment: Augment | None = None,
        views: ViewMaker | None = None,
        view_share: float = 1.0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int = 0,
        world: int = 1,
        resident: bool | None = None,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        replays: int = 1,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size}: a batch has at least one image.")
        if not 0 <= rank < world:
            raise DataError(f"rank={rank} of world={world}: ranks count from 0 to world - 1.")
        if drop_last and 0 < len(data) < batch_size:
            mend = "choose a smaller batch size, or keep the last batch (drop_last=False)"
            raise DataError(f"{len(data)} images make no full batch of {batch_size}: {mend}.")
        if not 0 <= view_share <= 1:
            raise DataError(f"view_share={view_share}: the share of images that come as views is 0 to 1.")
        if replays < 1:
            raise DataError(f"replays={replays}: a batch comes at least once.")
        self.device = torch.device(device)
        self.resident = _fits(data, self.device) if resident is None else resident
        self.data = data.to(self.device if self.resident else "cpu")
        self.batch_size, self.seed, self.shuffle, self.drop_last = batch_size, seed, shuffle, drop_last
        self.augment, self.views, self.view_share, self.replays = augment, views, view_share, replays
        self.rank, self.world, self.dtype, self.channels_last = rank, world, dtype, channels_last
        self._drawn: tuple[int, int, Tensor] | None = None

    def __len__(self) -> int:
        """Batches an epoch, replays included, the same for every rank."""
        return self._distinct * self.replays

    @property
    def _distinct(self) -> int:
        """Batches an epoch, each counted once."""
        full, rest = divmod(len(self.data), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def joint_size(self, index: int) -> int:
        """How many images batch `index` has over all processes."""
        return min(self.batch_size, len(self.data) - index // self.replays * self.batch_size)

    def share(self, index: int) -> slice:
        """The part of joint batch `index` that falls to this rank."""
        size = self.joint_size(index)
        return slice(self.rank * size // self.world, (self.rank + 1) * size // self.world)

    def order(self, epoch: int) -> Tensor:
        """The order the images come in, int64 (n,), drawn on the device, once."""
        n = len(self.data)
        if not self.shuffle:
            return torch.arange(n, device=self.device)
        if self._drawn is None or self._drawn[:2] != (self.seed, epoch):
            generator = torch.Generator(self.device)
            generator.manual_seed(derive_seed(self.seed, epoch, "order"))
            self._drawn = self.seed, epoch, torch.randperm(n, generator=generator, device=self.device)
        return self._drawn[2]

    def indices(self, epoch: int, index: int) -> Tensor:
        """Which images batch `index` of an epoch has for this rank, int64 (m,), on the device."""
        first = index // self.replays * self.batch_size
        return self.order(epoch)[first:][: self.batch_size][self.share(index)]

    def draws(self, epoch: int, index: int) -> Draws:
        """The crops and flips that this rank's images of batch `index` have in an epoch."""
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.seed, epoch, index // self.replays))
        return (self.augment or Augment()).draw(self.joint_size(index), generator)[self.share(index)]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from batch `start` on.

        Each is x, `dtype` (m, C, H, W) in [0, 1], and y, int64 (m,), both on the device. The same call gives
        the same batches, whatever was iterated before; neither torch's nor numpy's global generator is used.
        """
        if not 0 <= start <= len(self):
            raise DataError(f"start={start}: an epoch has batches 0 to {len(self)}.")
        return self._batches(epoch, start)

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        first, played = divmod(start, self.replays)
        for batch in self._augmented(epoch, first):
            for _ in range(played, self.replays):
                yield batch
            played = 0

    def _augmented(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches once each, as chance has them."""
        generator = torch.Generator(self.device)
        waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        for distinct, (x, y) in enumerate(self._rows(epoch, first), first):
            generator.manual_seed(derive_seed(self.seed, epoch, distinct))
            size, share = self.joint_size(distinct * self.replays), self.share(distinct * self.replays)
            # Drawn for the joint batch and then cut, so that the number of processes changes no image.
            if self.augment is not None:
                x = self.augment.apply(x, self.augment.draw(size, generator)[share])
            unit = to_unit(x, self.dtype, self.channels_last)
            if self.views is None:
                yield unit, y
                continue
            chance = self.views.draw(size, 1, generator=generator, device=self.device)
            if self.view_share < 1:
                left = torch.rand(len(chance), generator=generator, device=self.device) >= self.view_share
                chance = self.views.leave_alone(chance, left)
            waiting.append((unit, y, chance[share]))
            if len(waiting) >= self._at_once(unit.numel()):
                yield from self._as_views(waiting)
                waiting = []
        yield from self._as_views(waiting)

    def _at_once(self, pixels: int) -> int:
        """Batches of so many pixels whose views are made at once; on a CPU that would gain nothing."""
        return 1 if self.device.type == "cpu" else max(1, VIEWED_AT_ONCE // max(1, pixels))

    def _as_views(self, batches: list[tuple[Tensor, Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches (x, y, draws) with one view of each image in its place."""
        if not batches:
            return
        assert self.views is not None
        images, labels, draws = zip(*batches, strict=True)
        views = self.views(torch.cat(images), torch.cat(draws))[0]
        yield from zip(torch.split(views, [len(y) for y in labels]), labels, strict=True)

    def _rows(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The bytes and labels of this rank's share of each batch, on the device."""
        order = self.order(epoch)
        if not self.resident:
            order = order.cpu()  # once an epoch, the only wait for the device
        pinned = self.device.type == "cuda" and not self.resident
        for distinct in range(first, self._distinct):
            rows = order[distinct * self.batch_size :][: self.batch_size][self.share(distinct * self.replays)]
            x, y = (part.index_select(0, rows) for part in (self.data.images, self.data.labels))
            if pinned:
                x, y = x.pin_memory(), y.pin_memory()
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)


def _fits(data: ImageSet, device: torch.device) -> bool:
    """Whether the images may lie on the device; on anything but a CUDA device they do."""
    if device.type != "cuda" or data.images.device.type == "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return data.images.nbytes <= RESIDENT_SHARE * free
