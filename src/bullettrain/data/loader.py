"""Batches on the device, read from a resident copy of the data if it fits and from host memory if not.

A batch depends only on (seed, epoch, batch index) and on what :meth:`Loader.keep` keeps. So a run can resume in the
middle of an epoch, several processes can share a joint batch, and whether the data is resident makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, repeat

import torch
from torch import Tensor

from bullettrain.augmix import ViewMaker
from bullettrain.data.augment import Augment, Draws, to_unit
from bullettrain.data.base import DataError, ImageSet, derive_seed
from bullettrain.validation import check_count, check_number

RESIDENT_SHARE = 0.4  # of the free device memory: the network and its activations need the rest
VIEWED_AT_ONCE = 1 << 22  # pixels per call on a GPU, 1,365 CIFAR images: the overhead of a call is constant


class Loader:
    """Load the batches of a dataset, epoch by epoch.

    Args:
        data: the images and labels.
        batch_size: size of the joint batch over all processes. Every process gets a contiguous share of it. Shares
            differ by at most one image, and can be empty in a last batch smaller than ``world``: all processes take the
            same number of steps.
        seed: of the order, the augmentation and the views.
        device: device of the batches.
        augment: random crops and flips. Default: none.
        views: replaces images by one AugMix view of each. Default: none.
        view_share: share of the images that ``views`` replaces, drawn in every epoch.
        shuffle: whether to draw a new order in every epoch.
        drop_last: whether to leave out a last batch that is not full.
        rank: of this process.
        world: number of processes.
        resident: whether to keep the images on the device. Default: if they take at most 40 % of its free memory.
        dtype: of the images in a batch.
        channels_last: memory format of the images in a batch.
        replays: how many times in a row each batch is returned.

    Raises:
        DataError: an argument is out of range.
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
        for name, value in (("batch_size", batch_size), ("world", world), ("replays", replays)):
            check_count(value, name, least=1, error=DataError)
        check_count(rank, "rank", below=world, error=DataError)
        check_number(view_share, "view_share", least=0, most=1, error=DataError)
        if drop_last and 0 < len(data) < batch_size:
            fix = "choose a smaller batch size, or keep the last batch (drop_last=False)"
            raise DataError(f"{len(data)} images make no full batch of {batch_size}: {fix}.")
        self.device = torch.device(device)
        self.resident = _fits(data, self.device) if resident is None else resident
        self.data = data.to(self.device if self.resident else "cpu")
        self.batch_size, self.seed, self.shuffle, self.drop_last = batch_size, seed, shuffle, drop_last
        self.augment, self.views, self.view_share = augment or Augment(), views, view_share
        self.rank, self.world, self.dtype, self.channels_last = rank, world, dtype, channels_last
        self.replays = replays
        self._kept: Tensor | None = None
        self._size = len(data)  # images of an epoch
        self._last_order: tuple[int, int, Tensor] | None = None

    def keep(self, kept: Tensor) -> None:
        """Leave out all images but ``kept``, bool (n,), from here on. Those that are kept stay in their order."""
        self._kept, self._size, self._last_order = kept.to(self.device), int(kept.sum()), None

    @property
    def kept_share(self) -> float:
        """Share of the images that is kept."""
        return self._size / len(self.data)

    def __len__(self) -> int:
        """Return the batches per epoch, including replays; the same for every rank."""
        full, rest = divmod(self._size, self.batch_size)
        return (full + (rest > 0 and not self.drop_last)) * self.replays

    def joint_size(self, index: int) -> int:
        """Return the size of batch ``index`` over all processes."""
        return min(self.batch_size, self._size - index // self.replays * self.batch_size)

    def share(self, index: int) -> slice:
        """Return this rank's part of joint batch ``index``."""
        size = self.joint_size(index)
        return slice(self.rank * size // self.world, (self.rank + 1) * size // self.world)

    def order(self, epoch: int) -> Tensor:
        """Return the order of the images in an epoch, int64 (n,), on the device; cached for one epoch."""
        if self._last_order is None or self._last_order[:2] != (self.seed, epoch):
            order = torch.arange(len(self.data), device=self.device)
            if self.shuffle:
                generator = torch.Generator(self.device)
                generator.manual_seed(derive_seed(self.seed, epoch, "order"))
                order = torch.randperm(len(self.data), generator=generator, device=self.device)
            self._last_order = self.seed, epoch, order if self._kept is None else order[self._kept[order]]
        return self._last_order[2]

    def indices(self, epoch: int, index: int) -> Tensor:
        """Return the dataset indices of this rank's images in batch ``index``, int64 (m,), on the device."""
        return self._rows(self.order(epoch), index)

    def draws(self, epoch: int, index: int) -> Draws:
        """Return the crops and flips of this rank's images in batch ``index``."""
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.seed, epoch, index // self.replays))
        return self.augment.draw(self.joint_size(index), generator)[self.share(index)]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an iterator over the batches of an epoch, beginning with batch ``start``.

        A batch is x, ``dtype`` (m, C, H, W) in [0, 1], and y, int64 (m,), both on the device. The same arguments give
        the same batches. The global generators of torch and numpy are not used.
        """
        check_count(start, "start", most=len(self), error=DataError)
        replayed = start % self.replays
        batches = self._batches(epoch, start - replayed)
        return islice(chain.from_iterable(repeat(batch, self.replays) for batch in batches), replayed, None)

    def _batches(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches from index ``first`` on, each once."""
        order = self.order(epoch)
        if not self.resident:
            order = order.cpu()  # once per epoch, the only synchronisation with the device
        generator = torch.Generator(self.device)
        waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        for index in range(first, len(self), self.replays):
            x, y = self._read(self._rows(order, index))
            generator.manual_seed(derive_seed(self.seed, epoch, index // self.replays))
            # Drawn for the joint batch and then cut, so that the number of processes changes no image.
            size, share = self.joint_size(index), self.share(index)
            x = self.augment.apply(x, self.augment.draw(size, generator)[share])
            x = to_unit(x, self.dtype, self.channels_last)
            if self.views is None:
                yield x, y
                continue
            draws = self.views.draw(size, 1, generator=generator, device=self.device)
            if self.view_share < 1:
                unchanged = torch.rand(size, generator=generator, device=self.device) >= self.view_share
                draws = self.views.leave_alone(draws, unchanged)
            waiting.append((x, y, draws[share]))
            if len(waiting) >= self._at_once(x.numel()) or index + self.replays >= len(self):
                images, labels, chances = zip(*waiting, strict=True)
                views = self.views(torch.cat(images), torch.cat(chances))[0]
                yield from zip(torch.split(views, [len(y) for y in labels]), labels, strict=True)
                waiting = []

    def _at_once(self, pixels: int) -> int:
        """Return how many batches of ``pixels`` pixels to make views of in one call; more gain nothing on a CPU."""
        return 1 if self.device.type == "cpu" else max(1, VIEWED_AT_ONCE // max(1, pixels))

    def _rows(self, order: Tensor, index: int) -> Tensor:
        first = index // self.replays * self.batch_size
        return order[first:][: self.batch_size][self.share(index)]

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes and labels of some images, on the device."""
        x, y = (part.index_select(0, rows) for part in (self.data.images, self.data.labels))
        if self.device.type == "cuda" and not self.resident:
            x, y = x.pin_memory(), y.pin_memory()
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)


def _fits(data: ImageSet, device: torch.device) -> bool:
    """Return whether to keep the images on the device: always, except on a CUDA device that lacks the memory."""
    if device.type != "cuda" or data.images.device.type == "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return data.images.nbytes <= RESIDENT_SHARE * free
