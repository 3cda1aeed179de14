"""Random crops and flips of whole batches as tensor operations, and the way from bytes to [0, 1]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bullettrain.data.base import DataError


@dataclass(frozen=True)
class Draws:
    """What chance decided for n images: corners int64 (n, 2) in 0..2·crop, flips bool (n,); None: off."""

    corners: Tensor | None
    flips: Tensor | None

    def __getitem__(self, part: slice) -> Draws:
        """The draws of some of the images."""
        return Draws(
            None if self.corners is None else self.corners[part],
            None if self.flips is None else self.flips[part],
        )


@dataclass(frozen=True)
class Augment:
    """Zero-pad by `crop` pixels and crop back at random; mirror left to right with probability 1/2."""

    crop: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise DataError(f"crop={self.crop}: the padding of a random crop is 0 (none) or more pixels.")

    def draw(self, n: int, generator: torch.Generator) -> Draws:
        """Decide the crops and flips of n images, on the generator's device."""
        device = generator.device
        corners = flips = None
        if self.crop:
            corners = torch.randint(0, 2 * self.crop + 1, (n, 2), generator=generator, device=device)
        if self.flip:
            flips = torch.rand(n, generator=generator, device=device) < 0.5
        return Draws(corners, flips)

    def pixels(self, x: Tensor, draws: Draws) -> Tensor:
        """Where in the padded image, row by row, each pixel of a cropped and flipped x (n, C, H, W) lies: (n, H·W)."""
        n, _, height, width = x.shape
        rows = torch.arange(height, device=x.device).expand(n, height)
        columns = torch.arange(width, device=x.device).expand(n, width)
        if draws.flips is not None:
            columns = torch.where(draws.flips[:, None], width - 1 - columns, columns)
        if draws.corners is None:
            rows, columns = rows + self.crop, columns + self.crop
        else:
            rows, columns = rows + draws.corners[:, :1], columns + draws.corners[:, 1:]
        return (rows[:, :, None] * (width + 2 * self.crop) + columns[:, None, :]).flatten(1)

    def apply(self, x: Tensor, draws: Draws) -> Tensor:
        """Crop and flip x (n, C, H, W) of any dtype as drawn; the result has the shape and dtype of x."""
        if draws.corners is None and draws.flips is None:
            return x
        # One gather for crop and flip together.
        padded = F.pad(x, (self.crop,) * 4) if self.crop else x
        return padded.flatten(2).gather(2, self.pixels(x, draws)[:, None].expand(*x.shape[:2], -1)).view(x.shape)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Crop and flip x (n, C, H, W) at random; `generator` is on the device of x."""
        return self.apply(x, self.draw(len(x), generator))


def to_unit(x: Tensor, dtype: torch.dtype = torch.float32, channels_last: bool = False) -> Tensor:
    """Bytes (n, C, H, W) as numbers in [0, 1] of `dtype`.

    No mean is taken off and nothing divided by a deviation: attacks bound their change in [0, 1], so a
    network that wants other inputs normalises inside itself.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # divide first, then round to half
    return x.to(wide, memory_format=layout).div(255).to(dtype)
