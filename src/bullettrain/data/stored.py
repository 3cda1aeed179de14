"""Perturbations that are carried over from epoch to epoch, while the crop and the flip of an image change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bullettrain.data.augment import Augment, Draws


class StoredPerturbations:
    """The last perturbation of each image of a dataset, to start its next attack from.

    It is kept where it lies in the padded image, so that crop and flip can be undone: a pixel's perturbation goes with
    the pixel. What the crop of now did not show then is 0.

        stored = StoredPerturbations(len(dataset), (3, 32, 32), augment)
        for x, y, index, draws in batches:
            out = train.step(model, x, y, start=stored.start(x, index, draws), index=index)
            stored.keep(x, out.x_prime, index, draws)

    Args:
        images: how many there are.
        shape: (C, H, W) of one.
        augment: what crops and flips them.
        device: where it is kept; half a gigabyte for CIFAR-10, and half of that in int8.
        dtype: in which.
        unit: what 1 of ``dtype`` stands for; eps / 127 keeps perturbations of up to eps in int8.
    """

    def __init__(
        self,
        images: int,
        shape: Sequence[int],
        augment: Augment,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float16,
        unit: float = 1.0,
    ) -> None:
        channels, height, width = shape
        size = images, channels, (height + 2 * augment.crop) * (width + 2 * augment.crop)
        self.augment, self.unit, self.delta = augment, unit, torch.zeros(size, dtype=dtype, device=device)

    def start(self, x: Tensor, index: Tensor, draws: Draws) -> Tensor:
        """``x`` (m, C, H, W), cropped and flipped by ``draws``, with what is kept of the images ``index`` (m,)."""
        pixels = self.augment.pixels(x, draws)[:, None].expand(*x.shape[:2], -1)
        return x + self.unit * self.delta.index_select(0, index).gather(2, pixels).view(x.shape).to(x.dtype)

    def keep(self, x: Tensor, x_prime: Tensor, index: Tensor, draws: Draws) -> None:
        """Keep the perturbations of x' (m, C, H, W); those outside the crop are forgotten."""
        pixels = self.augment.pixels(x, draws)[:, None].expand(*x.shape[:2], -1)
        whole = torch.zeros_like(self.delta[: len(index)])
        moved = (x_prime - x).detach().flatten(2) / self.unit
        whole.scatter_(2, pixels, (moved if whole.is_floating_point() else moved.round()).to(whole.dtype))
        self.delta.index_copy_(0, index, whole)

    def draw(self, eps: float, generator: torch.Generator | None = None) -> None:
        """Begin anew from x with ``eps`` added to, or taken from, each pixel by chance."""
        size = eps / self.unit if self.delta.is_floating_point() else round(eps / self.unit)
        self.delta.bernoulli_(0.5, generator=generator).mul_(2).sub_(1).mul_(size)

    def clear(self) -> None:
        """Begin anew from x itself."""
        self.delta.zero_()
