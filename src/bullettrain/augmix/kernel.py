"""A Triton kernel that makes AugMix views on a CUDA device, equal bit for bit to `operations.py` and `views.py`.

As tensor operations, all chains take about 300 kernels, most of which read or write every chain of every view. Here one
program makes one view, and only applies the operations that were drawn for it. Triton comes with the CUDA builds of
torch; without it, `views.py` uses tensor operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bullettrain.augmix.operations import Operation, rounding_error

OPTIONS = {"enable_fp_fusion": False}
"""Compiler options. Pillow rounds every product, so products and sums are not fused."""
TILE = 1024
"""Pixels that a program processes at a time."""
AUTOCONTRAST, EQUALIZE = tl.constexpr(int(Operation.AUTOCONTRAST)), tl.constexpr(int(Operation.EQUALIZE))
POSTERIZE, SOLARIZE = tl.constexpr(int(Operation.POSTERIZE)), tl.constexpr(int(Operation.SOLARIZE))


def add_chains(mixed: Tensor, pixels: Tensor, factor: Tensor, operation: Tensor, maps: Tensor, tones: Tensor) -> None:
    """Add factor · chain to each view.

    Args:
        mixed: views so far, floating (v, n, C, H, W) in any layout; changed in place.
        pixels: the images, uint8 (n, C, H, W).
        factor: weight of each chain's bytes, (v, width, n).
        operation: (v, width, n, links) of :class:`Operation`, without the last four.
        maps, tones: their parameters, float64 (v, width, n, links, 6) and int32 (v, width, n, links, 4).
    """
    views, n, channels, height, width = mixed.shape
    if not views * n:
        return
    # Three images per view: the original, and two that the operations of a chain write in turn.
    scratch = torch.empty(views * n, 3, channels * height * width, dtype=torch.uint8, device=mixed.device)
    tile = min(TILE, triton.next_power_of_2(height * width))
    launch = _add_chains[(views * n,)]
    with torch.cuda.device_of(mixed):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        launch(
            mixed,
            pixels.contiguous(),
            factor.to(mixed.dtype).contiguous(),
            operation.to(torch.int32).contiguous(),
            maps.contiguous(),
            tones.contiguous(),
            scratch,
            n,
            *mixed.stride(),
            CHAINS=factor.shape[1],
            LINKS=operation.shape[3],
            C=channels,
            H=height,
            W=width,
            ERROR=rounding_error(height, width, maps.dtype),
            TILE=tile,
            num_warps=max(1, tile // 128),
            **OPTIONS,
        )


@triton.jit
def _add_chains(
    mixed,
    pixels,
    factor,
    operation,
    maps,
    tones,
    scratch,
    n,
    by_view,
    by_image,
    by_channel,
    by_row,
    by_column,
    CHAINS: tl.constexpr,
    LINKS: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    ERROR: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Make one view: program v·n + j makes view v of image j."""
    program = tl.program_id(0).to(tl.int64)
    view, image = program // n, program % n
    size = C * H * W
    slots = scratch + program * (3 * size)
    spot = tl.arange(0, TILE)
    for first in range(0, size, TILE):
        there = first + spot < size
        tl.store(slots + first + spot, tl.load(pixels + image * size + first + spot, mask=there), mask=there)
    tl.debug_barrier()  # other threads read what this one wrote
    for chain in range(CHAINS):
        at = (view * CHAINS + chain) * n + image
        slot = 0
        for link in range(LINKS):
            which = at * LINKS + link
            kind = tl.load(operation + which)
            if kind >= 0:
                free = tl.where(slot == 1, 2, 1)
                source, target = slots + slot * size, slots + free * size
                if (kind == AUTOCONTRAST) | (kind == EQUALIZE) | (kind == POSTERIZE) | (kind == SOLARIZE):
                    _look_up(source, target, tones + which * 4, C, H * W, TILE)
                else:
                    _warp(source, target, maps + which * 6, C, H, W, ERROR, TILE)
                slot = free
                tl.debug_barrier()
        weight = tl.load(factor + at)
        for channel in range(C):
            for first in range(0, H * W, TILE):
                pixel = first + spot
                there = pixel < H * W
                byte = tl.load(slots + slot * size + channel * (H * W) + pixel, mask=there, other=0)
                goal = mixed + view * by_view + image * by_image + channel * by_channel
                goal += (pixel // W) * by_row + (pixel % W) * by_column
                before = tl.load(goal, mask=there, other=0.0)
                tl.store(goal, before + weight * byte.to(before.dtype), mask=there)
        tl.debug_barrier()


@triton.jit
def _warp(
    source,
    target,
    affine,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    ERROR: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Apply `operations._warp` to one image, with the arithmetic of grid_sample."""
    a, b, c = tl.load(affine), tl.load(affine + 1), tl.load(affine + 2)
    d, e, f = tl.load(affine + 3), tl.load(affine + 4), tl.load(affine + 5)
    spot = tl.arange(0, TILE)
    for first in range(0, H * W, TILE):
        pixel = first + spot
        there = pixel < H * W
        x, y = (pixel % W).to(a.dtype) + 0.5, (pixel // W).to(a.dtype) + 0.5
        from_x, from_y = a * x + c + b * y, e * y + f + d * x
        inside = (from_x >= -1) & (from_x < 1) & (from_y >= -1) & (from_y < 1)
        column = tl.minimum(tl.maximum(((from_x + 1) * W - 1) * 0.5, 0.0), W - 1.0)
        row = tl.minimum(tl.maximum(((from_y + 1) * H - 1) * 0.5, 0.0), H - 1.0)
        left, top = tl.floor(column), tl.floor(row)
        right, bottom = left + 1, top + 1
        corner = source + top.to(tl.int32) * W + left.to(tl.int32)
        east, south = there & (right < W), there & (bottom < H)
        for channel in range(C):
            at = corner + channel * (H * W)
            sampled = tl.load(at, mask=there, other=0).to(a.dtype) * ((right - column) * (bottom - row))
            sampled += tl.load(at + 1, mask=east, other=0).to(a.dtype) * ((column - left) * (bottom - row))
            sampled += tl.load(at + W, mask=south, other=0).to(a.dtype) * ((right - column) * (row - top))
            sampled += tl.load(at + W + 1, mask=east & south, other=0).to(a.dtype) * ((column - left) * (row - top))
            byte = (tl.where(inside, sampled, 0.0) + ERROR).to(tl.int32).to(tl.uint8)
            tl.store(target + channel * (H * W) + pixel, byte, mask=there)


@triton.jit
def _look_up(source, target, tones, C: tl.constexpr, AREA: tl.constexpr, TILE: tl.constexpr) -> None:
    """Apply `operations._look_up` to one image."""
    stretch, spread = tl.load(tones), tl.load(tones + 1)
    dropped, inverted_from = tl.load(tones + 2), tl.load(tones + 3)
    spot, shade = tl.arange(0, TILE), tl.arange(0, 256)
    for channel in range(C):
        histogram = tl.zeros([256], tl.int32)
        for first in range(0, AREA, TILE):
            there = first + spot < AREA
            byte = tl.load(source + channel * AREA + first + spot, mask=there, other=0).to(tl.int32)
            histogram += tl.histogram(byte, 256, mask=there)
        low = tl.min(tl.where(histogram > 0, shade, 255), axis=0)
        high = tl.max(tl.where(histogram > 0, shade, 0), axis=0)
        step = (AREA - tl.sum(tl.where(shade == high, histogram, 0), axis=0)) // 255
        darker = tl.cumsum(histogram, axis=0) - histogram
        scale = tl.full([], 255, tl.float64) / tl.maximum(high - low, 1).to(tl.float64)
        stretched = tl.minimum(tl.maximum(shade.to(tl.float64) * scale + -low.to(tl.float64) * scale, 0.0), 255.0)
        evened = tl.minimum((step // 2 + darker) // tl.maximum(step, 1), 255)
        table = tl.where((stretch > 0) & (high > low), stretched.to(tl.int32), shade >> dropped << dropped)
        table = tl.where((spread > 0) & (step > 0), evened, table)
        table = tl.where(shade >= inverted_from, 255 - shade, table)
        for first in range(0, AREA, TILE):
            there = first + spot < AREA
            byte = tl.load(source + channel * AREA + first + spot, mask=there, other=0).to(tl.int32)
            tl.store(target + channel * AREA + first + spot, tl.gather(table, byte, 0).to(tl.uint8), mask=there)
