"""Weather: snow, frost, fog, brightness, spatter. Input and output are uint8 (n, 32, 32, 3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bullettrain.corruptions.chance import Chance
from bullettrain.corruptions.colour import from_hsv, to_hsv
from bullettrain.corruptions.filters import SIDE, clipped_zoom, gaussian, motion, to_bytes, unit
from bullettrain.data.readers import Array
from bullettrain.extras import extra

GREY = (0.299, 0.587, 0.114)
WATER = (175 / 255, 238 / 255, 238 / 255)  # pale turquoise
MUD = (63 / 255, 42 / 255, 20 / 255)  # brown


def brightness(images: Tensor, more: float, chance: Chance) -> Tensor:
    """Raise V of HSV by ``more``."""
    hue, saturation, value = to_hsv(unit(images))
    return to_bytes(from_hsv(hue, saturation, (value + more).clamp(0, 1)))


def snow(images: Tensor, level: tuple[float, float, float, float, int, float, float], chance: Chance) -> Tensor:
    """Add motion-blurred flakes to a whitened image."""
    mean, std, zoom, threshold, radius, sigma, mix = level
    layer = clipped_zoom(chance.normal(SIDE, SIDE, mean=mean, std=std), zoom)
    layer = to_bytes(layer.masked_fill_(layer < threshold, 0))
    layer = unit(motion(layer, radius, sigma, chance.uniform(low=-135, high=-45)))[..., None]
    x = unit(images)
    grey = x[..., 0] * GREY[0] + x[..., 1] * GREY[1] + x[..., 2] * GREY[2]
    x = x * mix + torch.maximum(x, (grey * 1.5 + 0.5)[..., None]) * (1 - mix)
    return to_bytes(x + layer + layer.flip(1, 2))


def frost(images: Tensor, level: tuple[float, float], chance: Chance, overlays: Sequence[Tensor]) -> Tensor:
    """Add a random crop of one of the overlays, each uint8 (h, w, 3)."""
    of_image, of_frost = level
    which = chance.below(len(overlays))
    heights, widths = (torch.tensor([o.shape[i] - SIDE for o in overlays], device=images.device) for i in (0, 1))
    top, left = chance.below(heights[which]), chance.below(widths[which])
    piece = torch.empty_like(images)
    at = torch.arange(SIDE, device=images.device)
    for i, overlay in enumerate(overlays):
        rows = which == i
        y, x = top[rows][:, None, None] + at[:, None], left[rows][:, None, None] + at
        piece[rows] = overlay.to(images.device)[y, x]
    return (images.double() * of_image + piece.double() * of_frost).clamp_(0, 255).to(torch.uint8)


def fog(images: Tensor, level: tuple[float, float], chance: Chance) -> Tensor:
    """Add a plasma fractal, and rescale to the maximum of the image."""
    amount, decay = level
    x = unit(images)
    highest = x.amax(dim=(1, 2, 3), keepdim=True)
    return to_bytes((x + _plasma(chance, decay)[..., None] * amount) * highest / (highest + amount))


def _plasma(chance: Chance, decay: float) -> Tensor:
    """Return a periodic diamond-square fractal, (n, 32, 32) in [0, 1]; ``decay`` divides the noise at each scale."""
    field = torch.zeros(chance.n, SIDE, SIDE, dtype=torch.float64, device=chance.device)
    step, wobble = SIDE, 100.0

    def mean(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return (a + b + (c + d)) / 4 + chance.uniform(*a.shape[1:], low=-wobble, high=wobble) * wobble

    while step >= 2:
        half = step // 2
        corner = field[:, ::step, ::step]
        below = corner.roll(-1, 1)
        centre = mean(corner, below, corner.roll(-1, 2), below.roll(-1, 2))
        field[:, half::step, half::step] = centre
        field[:, ::step, half::step] = mean(centre, centre.roll(1, 1), corner, corner.roll(-1, 2))
        field[:, half::step, ::step] = mean(centre, centre.roll(1, 2), corner, corner.roll(-1, 1))
        step, wobble = half, wobble / decay
    field -= field.amin(dim=(1, 2), keepdim=True)
    return field / field.amax(dim=(1, 2), keepdim=True)


def spatter(images: Tensor, level: tuple[float, float, float, float, float, int], chance: Chance) -> Tensor:
    """Add drops of water or splashes of mud. Water uses OpenCV, one image at a time on the CPU."""
    mean, std, sigma, threshold, amount, mud = level
    x = unit(images)
    liquid = gaussian(chance.normal(SIDE, SIDE, mean=mean, std=std), sigma)
    if mud:
        mask = gaussian((liquid > threshold).double(), amount)
        mask = mask.masked_fill_(mask < 0.8, 0)[..., None]
        return to_bytes(x * (1 - mask) + mask * torch.tensor(MUD, dtype=x.dtype, device=x.device))
    layer = to_bytes(liquid.masked_fill_(liquid < threshold, 0))
    mask = torch.from_numpy(np.stack([_drops(one) for one in layer.cpu().numpy()])).to(x.device)[..., None]
    return to_bytes(x + mask * amount * torch.tensor(WATER, dtype=x.dtype, device=x.device))


def _drops(layer: Array) -> Array:
    """Return the brightness of drops in a liquid layer, uint8 (32, 32), as float64 in [0, 1]."""
    with extra("the corruption spatter", "corruptions"):
        import cv2
    distance = cv2.distanceTransform(255 - cv2.Canny(layer, 50, 150), cv2.DIST_L2, 5)
    distance = cv2.blur(np.minimum(distance, 20), (3, 3)).astype(np.uint8)
    relief = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], np.float32)
    lit = cv2.blur(cv2.filter2D(cv2.equalizeHist(distance), cv2.CV_8U, relief), (3, 3))
    light: Array = layer * lit.astype(np.float64)
    light /= max(float(light.max()), 1.0)  # avoids 0/0 without liquid
    return light
