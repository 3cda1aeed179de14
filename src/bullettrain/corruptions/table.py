"""The 19 corruptions of CIFAR-10-C and CIFAR-100-C, with the parameters of the released files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bullettrain.corruptions import blur, digital, noise, weather
from bullettrain.corruptions.chance import Chance
from bullettrain.corruptions.filters import SIDE
from bullettrain.validation import check_count, check_known

SEVERITIES = 5


@dataclass(frozen=True)
class Corruption:
    """A corruption.

    Attributes:
        apply: function (images uint8 (n, 32, 32, 3), level, chance) → images; frost also takes its overlays.
        levels: parameters at severities 1 to 5.
        extra: whether it is not among the 15 that are averaged.
        random: whether it uses random numbers.
        serial: whether it calls a library for one image at a time, on the CPU.
    """

    apply: Callable[..., Tensor]
    levels: tuple[Any, Any, Any, Any, Any]
    extra: bool = False
    random: bool = True
    serial: bool = False


CORRUPTIONS: Mapping[str, Corruption] = {
    "gaussian_noise": Corruption(noise.gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": Corruption(noise.shot_noise, (500, 250, 100, 75, 50)),
    "impulse_noise": Corruption(noise.impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "defocus_blur": Corruption(
        blur.defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)), random=False
    ),
    "glass_blur": Corruption(blur.glass_blur, ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))),
    "motion_blur": Corruption(blur.motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": Corruption(blur.zoom_blur, (1.06, 1.11, 1.16, 1.21, 1.26), random=False),
    "snow": Corruption(
        weather.snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "frost": Corruption(weather.frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    "fog": Corruption(weather.fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": Corruption(weather.brightness, (0.05, 0.1, 0.15, 0.2, 0.3), random=False),
    "contrast": Corruption(digital.contrast, (0.75, 0.5, 0.4, 0.3, 0.15), random=False),
    "elastic_transform": Corruption(
        digital.elastic_transform,
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": Corruption(digital.pixelate, (0.95, 0.9, 0.85, 0.75, 0.65), random=False),
    "jpeg_compression": Corruption(digital.jpeg_compression, (80, 65, 58, 50, 40), random=False, serial=True),
    "speckle_noise": Corruption(noise.speckle_noise, (0.06, 0.1, 0.12, 0.16, 0.2), extra=True),
    "gaussian_blur": Corruption(blur.gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1), extra=True, random=False),
    "saturate": Corruption(
        digital.saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)), extra=True, random=False
    ),
    "spatter": Corruption(
        weather.spatter,
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
        extra=True,
        serial=True,
    ),
}
AVERAGED = tuple(name for name, corruption in CORRUPTIONS.items() if not corruption.extra)
"""The 15 corruptions of the mean accuracy."""


def corrupt(
    images: Tensor, name: str, severity: int, *, seed: int = 0, first: int = 0, overlays: Sequence[Tensor] = ()
) -> Tensor:
    """Corrupt a batch of images, on its device.

    Args:
        images: uint8 (n, 32, 32, 3).
        name: one of CORRUPTIONS.
        severity: 1 to 5.
        seed: of the random numbers, which depend only on the seed, corruption, severity and index of an image.
        first: index of the first image.
        overlays: the images for frost, from `read_overlays`.

    Returns:
        uint8 (n, 32, 32, 3).
    """
    check_known(name, CORRUPTIONS, "there is no corruption")
    check_count(severity, "severity", least=1, most=SEVERITIES)
    if images.dtype != torch.uint8 or images.shape[1:] != (SIDE, SIDE, 3):
        raise ValueError(f"images are {images.dtype} of shape {tuple(images.shape)}; give uint8 (n, {SIDE}, {SIDE}, 3)")
    entry = CORRUPTIONS[name]
    chance = Chance(seed, name, severity, first=first, n=len(images), device=images.device)
    if name == "frost":
        if not overlays:
            raise ValueError("frost needs its overlays; read them with read_overlays")
        return entry.apply(images, entry.levels[severity - 1], chance, overlays)
    return entry.apply(images, entry.levels[severity - 1], chance)
