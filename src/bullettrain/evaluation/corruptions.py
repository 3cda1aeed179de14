"""Accuracy under the common corruptions of CIFAR-10-C and -100-C, and the error relative to another network's."""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bullettrain.corruptions.chance import Chance
from bullettrain.corruptions.files import LABELS, image_file, open_images, read_labels
from bullettrain.corruptions.filters import SIDE
from bullettrain.corruptions.table import AVERAGED, CORRUPTIONS, SEVERITIES
from bullettrain.data import ImageSet, to_unit
from bullettrain.data.base import DataError
from bullettrain.data.sets import sample
from bullettrain.evaluation.accuracy import clean_round, survive
from bullettrain.evaluation.results import CorruptionDetails, pack_counts
from bullettrain.loading import try_network

SPOT = ("gaussian_noise", "gaussian_blur", "contrast")
"""Corruptions that can be made of images of any size."""


def corruption_accuracy(
    model: nn.Module,
    folder: Path,
    *,
    classes: int,
    device: torch.device,
    batch_size: int = 500,
    size: int = 0,
    baseline: Mapping[str, Sequence[float]] | None = None,
    tick: Callable[[int], None] | None = None,
) -> CorruptionDetails:
    """Accuracy of the network, in eval mode, on the files of ``folder``: released ones, or those of `make`.

    Args:
        model: logits of images (m, 3, 32, 32).
        folder: of .npy files, which are memory-mapped, one at a time, and read severity by severity.
        classes: labels of more are refused.
        device: where the network is.
        batch_size: images at once.
        size: so many images at each severity, every class alike; 0: all.
        baseline: another network's accuracies at severities 1 to 5, by corruption, for the mean corruption error.
        tick: told after each batch how many images it had.
    """
    there = _there(folder)
    averaged = [name for name in AVERAGED if name in there]
    errors = None if baseline is None else [_baseline_errors(baseline, name) for name in averaged]
    labels = torch.from_numpy(read_labels(folder, classes))
    n = len(labels)
    for name in there:  # a wrong file is said before the first is evaluated
        open_images(image_file(folder, name), SEVERITIES * n)
    rows = sample(labels, min(size, n)) if size else torch.arange(n)
    labels = labels[rows]
    accuracy: dict[str, list[float]] = {name: [] for name in there}
    kept = torch.zeros(len(rows), dtype=torch.int64)
    seen = hashlib.blake2b(labels.numpy().tobytes(), digest_size=16)
    for number, (name, severity) in enumerate(itertools.product(there, range(SEVERITIES))):
        images = open_images(image_file(folder, name), SEVERITIES * n)[severity * n + rows.numpy()]
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
        if number == 0:
            try_network(model, to_unit(pixels[:2].to(device)), f"the images of {folder}")
        part = ImageSet(pixels, labels, tuple(map(str, range(classes))))
        right = survive([clean_round(model)], part, device=device, batch_size=batch_size, tick=tick).alive
        accuracy[name].append(int(right.sum()) / len(rows))
        if name in AVERAGED:
            seen.update(images[len(rows) // 2].tobytes())
            kept += right
    wrong = [math.fsum(1 - share for share in accuracy[name]) for name in averaged]
    mce = math.fsum(map(operator.truediv, wrong, errors)) / len(averaged) if errors else None
    return CorruptionDetails(
        accuracy,
        [name for name in AVERAGED if name not in there],
        len(averaged),
        len(rows),
        pack_counts(kept),
        seen.hexdigest(),
        mce,
    )


def list_files(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of the files in ``folder``: what changes with any of them."""
    found = [(file.name, file.stat()) for file in folder.glob("*.npy")]
    return sorted((name, about.st_size, about.st_mtime_ns) for name, about in found)


def count_images(folder: Path, size: int) -> int:
    """Images in the files of ``folder``, or ``size`` at each severity, for a progress bar."""
    sizes = [bytes_ for name, bytes_, _ in list_files(folder) if name != LABELS]
    return SEVERITIES * size * len(sizes) if size else sum(sizes) // (3 * SIDE * SIDE)


def spot_corruptions(
    model: nn.Module, images: ImageSet, *, device: torch.device, batch_size: int = 500
) -> dict[str, Any]:
    """Accuracy of the network, in eval mode, under noise, blur and contrast that are made here of images of any size.

    Returns:
        The mean, of how many images, over how many corruptions, and each of them at its severities.
    """
    pixels = images.images.permute(0, 2, 3, 1).contiguous().to(device)
    accuracy: dict[str, list[float]] = {name: [] for name in SPOT}
    for name, severity in itertools.product(SPOT, range(1, SEVERITIES + 1)):
        chance = Chance(0, name, severity, first=0, n=len(pixels), device=device)
        worse = CORRUPTIONS[name].apply(pixels, CORRUPTIONS[name].levels[severity - 1], chance)
        part = ImageSet(worse.permute(0, 3, 1, 2).contiguous().cpu(), images.labels.cpu(), images.classes)
        accuracy[name].append(survive([clean_round(model)], part, device=device, batch_size=batch_size).share)
    mean = math.fsum(share for shares in accuracy.values() for share in shares) / (SEVERITIES * len(SPOT))
    return {"accuracy": mean, "examples": len(images), "over": len(SPOT), "corruptions": accuracy}


def _baseline_errors(baseline: Mapping[str, Sequence[float]], name: str) -> float:
    """What the baseline gets wrong under a corruption, summed over severities."""
    shares = baseline.get(name, ())
    errors = math.fsum(1 - share for share in shares)
    if len(shares) != SEVERITIES or not all(0 <= share <= 1 for share in shares) or not errors:
        wanted = f"{SEVERITIES} accuracies in [0, 1], not all of them 1"
        raise DataError(f"the baseline has {list(shares)} for {name}: give {wanted}.")
    return errors


def _there(folder: Path) -> list[str]:
    """The corruptions that have a file in ``folder``: at least one of those that are averaged."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: give one that holds the .npy files of CIFAR-10-C or -100-C.")
    there = [name for name in CORRUPTIONS if image_file(folder, name).is_file()]
    if not set(there) & set(AVERAGED):
        dataset = "cifar100" if "100" in folder.name else "cifar10"  # only its name can say whose images they are of
        command = shlex.join(["bullettrain", "data", "corrupt", "--dataset", dataset, "--out", str(folder)])
        none = f"{folder} has none of the files {image_file(Path(), AVERAGED[0])} … that are averaged"
        raise DataError(f"{none}: put the released ones there, or run `{command}`.")
    return there
