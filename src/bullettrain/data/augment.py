"""Random crops and flips of whole batches, and the conversion from bytes to [0, 1]."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from bullettrain.data.base import DataError
from bullettrain.validation import check_limits, limits


@dataclass(frozen=True)
class Draws:
    """Random crops and flips of n images.

    Attributes:
        corners: upper left corner of each crop in the padded image, int64 (n, 2) in 0..2·crop; None for no crops.
        flips: whether each image is mirrored, bool (n,); None for no flips.
    """

    corners: Tensor | None
    flips: Tensor | None

    def __getitem__(self, part: slice) -> Draws:
        """Return the draws for a slice of the images."""
        return Draws(
            None if self.corners is None else self.corners[part],
            None if self.flips is None else self.flips[part],
        )


@dataclass(frozen=True)
class Augment:
    """Zero-pad by ``crop`` pixels and crop back at random; with ``flip``, mirror left to right with probability 1/2."""

    crop: int = field(default=0, metadata=limits(least=0))
    flip: bool = False

    def __post_init__(self) -> None:
        check_limits(self, error=DataError)

    def draw(self, n: int, generator: torch.Generator) -> Draws:
        """Draw the crops and flips of n images, on the device of the generator."""
        device = generator.device
        corners = flips = None
        if self.crop:
            corners = torch.randint(0, 2 * self.crop + 1, (n, 2), generator=generator, device=device)
        if self.flip:
            flips = torch.rand(n, generator=generator, device=device) < 0.5
        return Draws(corners, flips)

    def pixels(self, x: Tensor, draws: Draws) -> Tensor:
        """Return the index in the flattened padded image of each pixel of an augmented x (n, C, H, W): (n, H·W)."""
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
        """Crop and flip x (n, C, H, W), of any dtype, as drawn; keeps shape and dtype."""
        if draws.corners is None and draws.flips is None:
            return x
        # One gather for crop and flip together.
        padded = F.pad(x, (self.crop,) * 4) if self.crop else x
        return padded.flatten(2).gather(2, self.pixels(x, draws)[:, None].expand(*x.shape[:2], -1)).view(x.shape)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Crop and flip x (n, C, H, W) at random; ``generator`` is on the device of x."""
        return self.apply(x, self.draw(len(x), generator))


def to_unit(x: Tensor, dtype: torch.dtype = torch.float32, channels_last: bool = False) -> Tensor:
    """Convert bytes (n, C, H, W) to ``dtype`` in [0, 1].

    Does not normalise: attacks are bounded in [0, 1], so networks normalise their input themselves.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    precise = torch.float64 if dtype == torch.float64 else torch.float32  # divide before rounding to half precision
    return x.to(precise, memory_format=layout).div(255).to(dtype)
