"""Accuracy under the common corruptions of CIFAR-10-C and CIFAR-100-C, and the mean corruption error."""

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
"""Corruptions that apply to images of any size."""


def corruption_accuracy(
    model: nn.Module,
    folder: Path,
    *,
    classes: int,
    device: torch.device,
    batch_size: int = 500,
    size: int = 0,
    baseline: Mapping[str, Sequence[float]] | None = None,
    tick: Callable[[int], None] = lambda images: None,
) -> CorruptionDetails:
    """Return the accuracy of the network, in eval mode, on the corruptions in ``folder``.

    Args:
        model: network for images (m, 3, 32, 32).
        folder: folder of .npy files, released ones or made by `bullettrain data corrupt`.
        classes: number of classes.
        device: device of the network.
        batch_size: images per batch.
        size: number of images at each severity, stratified by class; 0: all.
        baseline: another network's accuracies at severities 1 to 5, by corruption, for the mean corruption error.
        tick: called after each batch with its number of images.
    """
    names = _available(folder)
    averaged = [name for name in AVERAGED if name in names]
    errors = None if baseline is None else [_baseline_errors(baseline, name) for name in averaged]
    labels = torch.from_numpy(read_labels(folder, classes))
    n = len(labels)
    for name in names:  # check all files before the first evaluation
        open_images(image_file(folder, name), SEVERITIES * n)
    rows = sample(labels, min(size, n)) if size else torch.arange(n)
    labels = labels[rows]
    accuracy: dict[str, list[float]] = {name: [] for name in names}
    counts = torch.zeros(len(rows), dtype=torch.int64)
    digest = hashlib.blake2b(labels.numpy().tobytes(), digest_size=16)
    for number, (name, severity) in enumerate(itertools.product(names, range(SEVERITIES))):
        images = open_images(image_file(folder, name), SEVERITIES * n)[severity * n + rows.numpy()]
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
        if number == 0:
            try_network(model, to_unit(pixels[:2].to(device)), f"the images of {folder}")
        part = ImageSet(pixels, labels, tuple(map(str, range(classes))))
        right = survive([clean_round(model)], part, device=device, batch_size=batch_size, tick=tick).alive
        accuracy[name].append(int(right.sum()) / len(rows))
        if name in AVERAGED:
            digest.update(images[len(rows) // 2].tobytes())
            counts += right
    wrong = [math.fsum(1 - share for share in accuracy[name]) for name in averaged]
    mce = math.fsum(map(operator.truediv, wrong, errors)) / len(averaged) if errors else None
    return CorruptionDetails(
        accuracy,
        [name for name in AVERAGED if name not in names],
        len(averaged),
        len(rows),
        pack_counts(counts),
        digest.hexdigest(),
        mce,
    )


def list_files(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and modification time of the files in ``folder``."""
    files = [(file.name, file.stat()) for file in folder.glob("*.npy")]
    return sorted((name, status.st_size, status.st_mtime_ns) for name, status in files)


def count_images(folder: Path, size: int) -> int:
    """Return the number of images to evaluate, for a progress bar."""
    sizes = [bytes_ for name, bytes_, _ in list_files(folder) if name != LABELS]
    return SEVERITIES * size * len(sizes) if size else sum(sizes) // (3 * SIDE * SIDE)


def spot_corruptions(
    model: nn.Module, images: ImageSet, *, device: torch.device, batch_size: int = 500
) -> dict[str, Any]:
    """Return the accuracy of the network, in eval mode, under noise, blur and contrast, for images of any size.

    Returns:
        Mean accuracy, number of images, number of corruptions, and accuracy by corruption and severity.
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
    """Return the baseline's error under a corruption, summed over severities."""
    shares = baseline.get(name, ())
    errors = math.fsum(1 - share for share in shares)
    if len(shares) != SEVERITIES or not all(0 <= share <= 1 for share in shares) or not errors:
        expected = f"{SEVERITIES} accuracies in [0, 1], not all of them 1"
        raise DataError(f"the baseline has {list(shares)} for {name}: give {expected}.")
    return errors


def _available(folder: Path) -> list[str]:
    """Return the corruptions that have a file. Raises DataError if no averaged one has."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: give one that holds the .npy files of CIFAR-10-C or -100-C.")
    names = [name for name in CORRUPTIONS if image_file(folder, name).is_file()]
    if not set(names) & set(AVERAGED):
        dataset = "cifar100" if "100" in folder.name else "cifar10"
        command = shlex.join(["bullettrain", "data", "corrupt", "--dataset", dataset, "--out", str(folder)])
        none = f"{folder} has none of the files {image_file(Path(), AVERAGED[0])} … that are averaged"
        raise DataError(f"{none}: put the released ones there, or run `{command}`.")
    return names
