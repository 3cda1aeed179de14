"""The operations of AugMix on batches of bytes, with a separate operation and strength for each image.

There are two kinds of operations. Rotate, shear and translate sample the image through an affine map; autocontrast,
equalize, posterize and solarize look each byte up in a table of 256 entries. So one link of a chain is one sampling and
one look-up for the whole batch, with an identity map or table for images that have the other kind of operation. (The
four operations of `all_ops` then blend the image with a degraded one.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from bullettrain.precision import accumulation_dtype

MOST = 10.0
"""The level at which an operation has its full strength."""
EQUALIZED_AT_ONCE = 64
"""Images processed at a time on a CPU: several times faster if they fit into its cache."""


class Operation(IntEnum):
    """The operations, in the order of the original code. The last four resemble test corruptions: off by default."""

    NONE = -1
    """No change, for chains that are shorter than others."""
    AUTOCONTRAST = 0
    EQUALIZE = 1
    POSTERIZE = 2
    ROTATE = 3
    SOLARIZE = 4
    SHEAR_X = 5
    SHEAR_Y = 6
    TRANSLATE_X = 7
    TRANSLATE_Y = 8
    COLOUR = 9
    CONTRAST = 10
    BRIGHTNESS = 11
    SHARPNESS = 12


FEW, ALL = 9, 13
"""Number of operations without and with the last four."""
Change = Callable[[Tensor, Tensor], Tensor]
"""``change(images (n, C, H, W), parameters (n, p)) -> images``."""


def operate(images: Tensor, operation: Tensor, level: Tensor, *, enhancing: bool = True) -> Tensor:
    """Apply operations to each image, one after the other, with the results of Pillow.

    Args:
        images: uint8 (n, C, H, W).
        operation: (n, links) of :class:`Operation`.
        level: floating (n, links) in [−10, 10]; only geometric operations use the sign.
        enhancing: whether the last four operations can occur; False is faster.

    Returns:
        uint8 (n, C, H, W).
    """
    if len(images) == 0:  # a batch without boundary examples
        return images
    height, width = images.shape[2:]
    maps, tones = maps_of(operation, level, height, width), tones_of(operation, level.abs())
    enhancements = _enhancements(operation, level.abs()) if enhancing else None
    for link in range(operation.shape[1]):
        images = _apply(_warp, images, maps[:, link], (2 / width, 0, -1, 0, 2 / height, -1))
        images = _apply(_look_up, images, tones[:, link], (0, 0, 0, 256))
        if enhancements is not None:
            images = _apply(_enhance, images, enhancements[:, link], (Operation.NONE, 1))
    return images


def _apply(change: Change, images: Tensor, parameters: Tensor, nothing: Sequence[float]) -> Tensor:
    """Change each image by its row of ``parameters`` (n, p); the row ``nothing`` stands for no change.

    On a CPU, images without a change are skipped. On a GPU, finding them would synchronise.
    """
    if images.device.type != "cpu":
        return change(images, parameters)
    changed = images.clone()
    needed = (parameters != parameters.new_tensor(nothing)).any(dim=1).nonzero()[:, 0]
    for rows in torch.split(needed, EQUALIZED_AT_ONCE) if len(needed) else ():
        changed[rows] = change(images[rows], parameters[rows])
    return changed


def maps_of(operation: Tensor, level: Tensor, height: int, width: int) -> Tensor:
    """Return rotate, shear and translate as affine maps (a, b, c, d, e, f), (…, 6), for operation and level (…).

    The point (x, y) of the result, in pixels, is sampled at (a·x + b·y + c, d·x + e·y + f), in the coordinates of
    grid_sample, from −1 to 1.
    """

    def only(kind: Operation, maximum: float) -> Tensor:
        return torch.where(operation == kind, level * maximum / MOST, 0.0)

    angle = -torch.deg2rad(only(Operation.ROTATE, 30).trunc())
    cos, sin = angle.cos(), angle.sin()
    b, d = sin + only(Operation.SHEAR_X, 0.3), only(Operation.SHEAR_Y, 0.3) - sin
    # The rotation is about the centre; shearing fixes the corner.
    c = width / 2 - cos * (width / 2) - sin * (height / 2) + only(Operation.TRANSLATE_X, width / 3).trunc()
    f = height / 2 + sin * (width / 2) - cos * (height / 2) + only(Operation.TRANSLATE_Y, height / 3).trunc()
    of_x, of_y = 2 / width, 2 / height
    return torch.stack([cos * of_x, b * of_x, c * of_x - 1, d * of_y, cos * of_y, f * of_y - 1], dim=-1)


def _warp(images: Tensor, maps: Tensor) -> Tensor:
    """Sample each image through its map (n, 6): bilinear between pixel centres, black outside the image."""
    height, width = images.shape[2:]
    a, b, c, d, e, f = maps[:, :, None, None].unbind(dim=1)
    x = torch.arange(0.5, width, device=maps.device, dtype=maps.dtype)
    y = torch.arange(0.5, height, device=maps.device, dtype=maps.dtype)[:, None]
    grid = maps.new_empty(len(images), height, width, 2)
    from_x = torch.add(a * x + c, b * y, out=grid[..., 0])
    from_y = torch.add(e * y + f, d * x, out=grid[..., 1])
    inside = (from_x >= -1) & (from_x < 1) & (from_y >= -1) & (from_y < 1)
    # As in Pillow, the edge is repeated beyond the outermost pixel centres; outside the image is black.
    sampled = F.grid_sample(images.to(maps.dtype), grid, "bilinear", "border", align_corners=False)
    # Pillow truncates to bytes: a whole number must not come out a rounding error too low.
    error = maps.new_full((), rounding_error(height, width, maps.dtype))
    return torch.addcmul(error, sampled, inside[:, None].to(maps.dtype)).to(torch.uint8)


def rounding_error(height: int, width: int, dtype: torch.dtype) -> float:
    """Return a bound on the rounding error of sampling, far below one byte level."""
    return 2**12 * max(height, width) * torch.finfo(dtype).eps


def tones_of(operation: Tensor, level: Tensor) -> Tensor:
    """Return autocontrast, equalize, posterize and solarize as int32 (…, 4), for operation and level (…).

    The four numbers are: whether to stretch, whether to equalize, lowest bits to drop, first byte to invert.
    """
    dropped = torch.where(operation == Operation.POSTERIZE, 4 + (level * 4 / MOST).int(), 0)
    inverted_from = torch.where(operation == Operation.SOLARIZE, 256 - (level * 256 / MOST).int(), 256)
    stretch, spread = operation == Operation.AUTOCONTRAST, operation == Operation.EQUALIZE
    return torch.stack([stretch.int(), spread.int(), dropped, inverted_from], dim=-1)


def _look_up(images: Tensor, tones: Tensor) -> Tensor:
    """Map the bytes of each channel through a table, which tones (n, 4) determine."""
    pixels = images.flatten(2).long()
    stretch, spread, dropped, inverted_from = tones[:, :, None, None].unbind(dim=1)
    byte = torch.arange(256, device=pixels.device, dtype=torch.int32)
    low, high = torch.aminmax(pixels, dim=2, keepdim=True)
    histogram = torch.zeros(*pixels.shape[:2], 256, dtype=torch.int32, device=pixels.device)
    histogram.scatter_add_(2, pixels, histogram.new_ones(()).expand_as(pixels))

    # Autocontrast: darkest to 0, brightest to 255, linear in between. A single colour is unchanged.
    width = (high - low).clamp_min(1).to(accumulation_dtype(pixels.device))
    scale = torch.full_like(width, 255) / width  # torch computes 255 / width as 255 · (1 / width)
    stretched = (byte * scale + -low * scale).clamp(0, 255).int()
    # Equalize: by the number of darker pixels. A single colour, or too few pixels: step 0, unchanged.
    step = (pixels.shape[2] - histogram.gather(2, high)) // 255
    darker = histogram.cumsum(dim=2, dtype=torch.int32) - histogram
    equalized = ((step // 2 + darker) // step.clamp_min(1)).clamp_max(255)

    table = torch.where((stretch > 0) & (high > low), stretched, byte >> dropped << dropped)
    table = torch.where((spread > 0) & (step > 0), equalized, table)
    table = torch.where(byte >= inverted_from, 255 - byte, table)
    return table.to(torch.uint8).gather(2, pixels).view_as(images)


def _enhancements(operation: Tensor, level: Tensor) -> Tensor:
    """Return the last four operations and their factor of 0.1 to 1.9, (…, 2), for operation and level (…)."""
    enhanced = operation >= Operation.COLOUR
    kind = torch.where(enhanced, operation, int(Operation.NONE)).to(level.dtype)
    return torch.stack([kind, torch.where(enhanced, level * 1.8 / MOST + 0.1, 1.0)], dim=-1)


def _enhance(images: Tensor, enhancements: Tensor) -> Tensor:
    """Blend each image (factor 1) with a degraded one (factor 0); factors above 1 extrapolate."""
    kind, factor = enhancements[:, :, None, None, None].unbind(dim=1)
    pixels = images.int()
    grey = _grey(pixels)
    mean = (grey.sum(dim=(2, 3), keepdim=True).to(factor.dtype) / grey[:1].numel() + 0.5).int()
    degraded = torch.where(kind == Operation.COLOUR, grey, pixels)
    degraded = torch.where(kind == Operation.CONTRAST, mean, degraded)
    degraded = torch.where(kind == Operation.BRIGHTNESS, 0, degraded)
    degraded = torch.where(kind == Operation.SHARPNESS, _smooth(pixels), degraded)
    mixed = degraded.float() + factor.float() * (pixels - degraded).float()  # in float32, as Pillow
    return mixed.clamp(0, 255).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """Return the luma (n, 1, H, W) of ITU-R 601 in the integer arithmetic of Pillow."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def _smooth(images: Tensor) -> Tensor:
    """Smooth with weights 5 for the pixel and 1 for its eight neighbours, over 13; border pixels are unchanged."""
    across = images[..., :-2] + images[..., 1:-1] + images[..., 2:]
    total = across[..., :-2, :] + across[..., 1:-1, :] + across[..., 2:, :] + 4 * images[..., 1:-1, 1:-1]
    smooth = images.clone()
    smooth[..., 1:-1, 1:-1] = (2 * total + 13) // 26
    return smooth
