"""Perturbations kept from epoch to epoch, aligned with the crop and flip of each epoch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bullettrain.data.augment import Augment, Draws
from bullettrain.precision import at_least_float32


class StoredPerturbations:
    """Keep the last perturbation of each image of a dataset, to start its next attack from.

    Perturbations are stored in the coordinates of the padded image, so that each follows its pixel through other crops
    and flips. Pixels that were outside the last crop start from 0.

        stored = StoredPerturbations(len(dataset), (3, 32, 32), augment)
        for x, y, index, draws in batches:
            out = train.step(model, x, y, start=stored.start(x, index, draws), index=index)
            stored.keep(x, out.x_prime, index, draws)

    Args:
        images: number of images in the dataset.
        shape: (C, H, W) of an image.
        augment: the augmentation that crops and flips them.
        device: device of the storage. CIFAR-10 takes half a gigabyte in float16 and half of that in int8.
        dtype: dtype of the storage.
        unit: perturbation that a stored 1 stands for; eps / 127 stores perturbations up to eps in int8.
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
        """Return ``x`` (m, C, H, W), augmented by ``draws``, plus the stored perturbations of images ``index`` (m,)."""
        pixels = self.augment.pixels(x, draws)[:, None].expand(*x.shape[:2], -1)
        return x + self.unit * self.delta.index_select(0, index).gather(2, pixels).view(x.shape).to(x.dtype)

    def keep(self, x: Tensor, x_prime: Tensor, index: Tensor, draws: Draws) -> None:
        """Store the perturbations x' − x, (m, C, H, W), and 0 outside the crop."""
        pixels = self.augment.pixels(x, draws)[:, None].expand(*x.shape[:2], -1)
        padded = torch.zeros_like(self.delta[: len(index)])
        delta = at_least_float32((x_prime - x).detach().flatten(2)) / self.unit
        if not padded.is_floating_point():
            largest = torch.iinfo(padded.dtype).max
            delta = delta.round().clamp(-largest, largest)  # more would wrap around to the other sign
        padded.scatter_(2, pixels, delta.to(padded.dtype))
        self.delta.index_copy_(0, index, padded)

    def draw(self, eps: float, generator: torch.Generator | None = None) -> None:
        """Reset all perturbations to random values of ±``eps`` per pixel."""
        size = eps / self.unit if self.delta.is_floating_point() else round(eps / self.unit)
        self.delta.bernoulli_(0.5, generator=generator).mul_(2).sub_(1).mul_(size)

    def clear(self) -> None:
        """Reset all perturbations to 0."""
        self.delta.zero_()
