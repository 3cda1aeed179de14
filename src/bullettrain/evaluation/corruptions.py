"""Accuracy under the common corruptions of CIFAR-10-C and -100-C, and the error relative to another network's."""

from __future__ import annotations

import hashlib
import itertools
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bullettrain.attacks import bare, frozen
from bullettrain.brief import first_line
from bullettrain.checks import check_logits_shape
from bullettrain.corruptions.chance import Chance
from bullettrain.corruptions.files import LABELS, Array, image_file, open_images, read_labels
from bullettrain.corruptions.table import AVERAGED, CORRUPTIONS, SEVERITIES
from bullettrain.data import ImageSet, to_unit
from bullettrain.data.base import DataError
from bullettrain.data.sets import sample
from bullettrain.evaluation.evaluated_model import float32_logits
from bullettrain.evaluation.survival import is_right
from bullettrain.mining import is_correct

SPOT = ("gaussian_noise", "gaussian_blur", "contrast")
"""Corruptions that can be made of images of any size."""
Tick = Callable[[int], None]
"""Told after each batch how many images it had."""


@dataclass(frozen=True)
class CorruptionResult:
    """What a network gets right under each corruption.

    accuracy: corruption → shares in [0, 1] at severities 1 to 5, the extra ones too where their files are there.
    missing: of the 15 that are averaged, those without a file. examples: images at each severity.
    kept: (n,) in how many of the averaged corruptions and severities each image is right. fingerprint: changes with
    the labels, and with some of the images of each averaged file. Neither is there where it was made by hand.
    """

    accuracy: dict[str, tuple[float, ...]]
    missing: tuple[str, ...]
    examples: int
    kept: Tensor | None = field(default=None, compare=False, repr=False)
    fingerprint: str = ""

    @property
    def mean(self) -> float:
        """Mean accuracy over the averaged corruptions that are there and their severities; NaN without any."""
        shares = [share for name in self._averaged for share in self.accuracy[name]]
        return math.fsum(shares) / len(shares) if shares else math.nan

    @property
    def over(self) -> int:
        """Over how many of the 15 corruptions the mean is."""
        return len(self._averaged)

    @property
    def _averaged(self) -> list[str]:
        return [name for name in AVERAGED if name in self.accuracy]


def corruption_accuracy(
    model: nn.Module,
    folder: Path,
    *,
    classes: int | None = None,
    device: torch.device,
    batch_size: int = 500,
    half: bool = False,
    names: Sequence[str] | None = None,
    size: int = 0,
    tick: Tick | None = None,
) -> CorruptionResult:
    """Accuracy of the network, in eval mode, on the files of ``folder``: released ones, or those of `make`.

    ``names``: judge on these alone. ``classes``: refuse labels of more. ``half``: forward in bf16. ``size``: so many
    images at each severity, every class alike; 0: all. Files are memory-mapped, one at a time, and read batch by batch.
    """
    chosen = _chosen(folder, names)
    labels = torch.from_numpy(read_labels(folder, classes))
    for name in chosen:  # a wrong file is said before the first is judged
        open_images(image_file(folder, name), SEVERITIES * len(labels))
    net, n = bare(model), len(labels)
    rows = sample(labels, min(size, n)) if size else torch.arange(n)
    labels = labels[rows].to(device)
    accuracy = {}
    kept = torch.zeros(len(rows), dtype=torch.int64, device=device)
    seen = hashlib.blake2b(labels.cpu().numpy().tobytes(), digest_size=16)
    with frozen(net), torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=half):
        for name in chosen:
            images = open_images(image_file(folder, name), SEVERITIES * n)
            right = [
                _right(net, images[at : at + n], rows, labels, folder, device, batch_size, tick)
                for at in range(0, len(images), n)
            ]
            accuracy[name] = tuple(int(hits.sum()) / len(rows) for hits in right)
            if name in AVERAGED:
                kept += torch.stack(right).sum(dim=0)
                for at in range(0, len(images), n):
                    seen.update(images[at + int(rows[len(rows) // 2])].tobytes())
    missing = tuple(name for name in AVERAGED if name not in accuracy and (names is None or name in names))
    return CorruptionResult(accuracy, missing, len(labels), kept.cpu(), seen.hexdigest())


def spot_corruptions(
    model: nn.Module, images: ImageSet, *, device: torch.device, batch_size: int = 500
) -> dict[str, Any]:
    """Accuracy of the network, in eval mode, under noise, blur and contrast that are made here of images of any size.

    Returns:
        The mean, of how many images, over how many corruptions, and each of them at its severities.
    """
    pixels, labels = images.images.permute(0, 2, 3, 1).contiguous().to(device), images.labels.to(device)
    accuracy: dict[str, list[float]] = {name: [] for name in SPOT}
    with frozen(model), torch.no_grad():
        for name, severity in itertools.product(SPOT, range(1, SEVERITIES + 1)):
            chance = Chance(0, name, severity, first=0, n=len(pixels), device=device)
            worse = CORRUPTIONS[name].apply(pixels, CORRUPTIONS[name].levels[severity - 1], chance)
            parts = torch.split(worse.permute(0, 3, 1, 2).contiguous(), batch_size)
            logits = torch.cat([model(to_unit(part)) for part in parts])
            accuracy[name].append(int(is_correct(logits, labels).sum()) / len(images))
    mean = math.fsum(share for shares in accuracy.values() for share in shares) / (SEVERITIES * len(SPOT))
    return {"accuracy": mean, "examples": len(images), "over": len(SPOT), "corruptions": accuracy}


def mean_corruption_error(result: CorruptionResult, baseline: Mapping[str, Sequence[float]]) -> float:
    """mCE: the mean over corruptions of the errors, summed over severities, divided by those of ``baseline``.

    ``baseline``: corruption → the other network's accuracies at severities 1 to 5, in [0, 1]. The mean is over the
    averaged corruptions that ``result`` has; 1 says as good as the baseline, and less is better.
    """
    ratios = []
    for name in AVERAGED:
        if name not in result.accuracy:
            continue
        if name not in baseline:
            raise DataError(f"the baseline has no {name}: give its accuracies for all that is judged.")
        shares = baseline[name]
        try:
            fine = len(shares) == SEVERITIES and all(0 <= float(share) <= 1 for share in shares)
        except (TypeError, ValueError):
            fine = False
        if not fine:
            raise DataError(f"the baseline has {shares!r} for {name}: give {SEVERITIES} accuracies in [0, 1].")
        errors = math.fsum(1 - float(share) for share in shares)
        if errors == 0:
            raise DataError(f"the baseline makes no error under {name}: there is nothing to divide by.")
        ratios.append(math.fsum(1 - share for share in result.accuracy[name]) / errors)
    return math.fsum(ratios) / len(ratios) if ratios else math.nan


def _making(folder: Path) -> str:
    """The command that makes the files of ``folder``; whose images they are of, only its name can say."""
    dataset = "cifar100" if "100" in folder.name else "cifar10"
    return shlex.join(["bullettrain", "data", "corrupt", "--dataset", dataset, "--out", str(folder)])


def _chosen(folder: Path, names: Sequence[str] | None) -> list[str]:
    """The corruptions to judge on: those asked for, or all, that have a file."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: give one that holds the .npy files of CIFAR-10-C or -100-C.")
    if unknown := [name for name in names or () if name not in CORRUPTIONS]:
        raise DataError(f"there is no corruption {unknown[0]!r}: there are {', '.join(CORRUPTIONS)}.")
    there = [name for name in CORRUPTIONS if image_file(folder, name).is_file()]
    chosen = [name for name in there if names is None or name in names]
    if absent := [name for name in names or () if CORRUPTIONS[name].extra and name not in there]:
        raise DataError(f"{image_file(folder, absent[0])} is missing: run `{_making(folder)} --only {absent[0]}`.")
    if not chosen:
        raise DataError(
            f"{folder} has none of the files {image_file(Path(), (names or AVERAGED)[0])} …:"
            f" put the released ones there, or run `{_making(folder)}`."
        )
    return chosen


def _right(
    net: nn.Module,
    images: Array,
    rows: Tensor,
    labels: Tensor,
    folder: Path,
    device: torch.device,
    batch_size: int,
    tick: Tick | None,
) -> Tensor:
    """Which of some rows of one severity's images, uint8 (n, 32, 32, 3), the network gets right: (rows,) bool."""
    right = []
    for at in range(0, len(rows), batch_size):
        pixels = torch.from_numpy(images[rows[at : at + batch_size].numpy()]).to(device)  # a copy: the map is read-only
        try:
            logits = float32_logits(net, to_unit(pixels.permute(0, 3, 1, 2).contiguous()))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            line = first_line(error)
            raise DataError(f"the network does not take the images of {folder}, 3×32×32: {line}") from error
        check_logits_shape(logits, len(pixels))
        if at == 0 and int(labels.max()) >= logits.shape[1]:
            raise DataError(
                f"{folder / LABELS} has the label {int(labels.max())}, but the network has {logits.shape[1]} classes."
            )
        right.append(is_right(logits, labels[at : at + len(pixels)]))
        if tick is not None:
            tick(len(pixels))
    return torch.cat(right)
