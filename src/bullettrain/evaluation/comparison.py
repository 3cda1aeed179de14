"""Difference of two accuracies with its standard error, paired by image where possible."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bullettrain.corruptions.table import SEVERITIES
from bullettrain.evaluation.results import unpack, unpack_counts

CORRUPTED_SPREAD = 0.73
"""Standard deviation of an image's share of 75 corrupted copies, relative to that of a single draw, at most: 0.62 to
0.73 for the 24 networks of results/augmix that record it."""
Figure = Mapping[str, Any]
"""An accuracy as stored in a record: `accuracy` and `examples`. If it is known which images survived, also the images'
`fingerprint` and `survived`, or `kept` for corruptions; and `among` if they are part of a larger set."""


@dataclass(frozen=True)
class Difference:
    """Difference of two mean accuracies, as shares."""

    value: float
    error: float
    """Standard error over the images."""
    paired: bool
    """Whether both were compared image by image."""
    run_noise: float = 0.0
    """Part of the variance over the images that several runs of a network show to be of the runs."""


def difference(mine: Sequence[Figure], other: Sequence[Figure]) -> Difference:
    """Return the mean accuracy of ``mine`` minus that of ``other``, each of one or several networks.

    The difference is paired, over the images that all have in common, if all figures say which images of the same set
    survived and have at least half of the smallest number in common. Otherwise the images are taken as independent.
    An empty ``other`` counts as 0.
    """
    means: list[float] = []
    errors: list[float] = []
    for side in (mine, other):
        means.append(statistics.fmean(figure["accuracy"] for figure in side) if side else 0.0)
        error = share_error(means[-1], min(figure["examples"] for figure in side)) if side else 0.0
        errors.append(error * (CORRUPTED_SPREAD if any("over" in figure for figure in side) else 1.0))
    unpaired = Difference(means[0] - means[1], math.hypot(*errors), False)
    figures = (*mine, *other)
    known = all(figure.get("survived") or figure.get("kept") for figure in figures)
    if not (mine and other and known and len({_images(figure) for figure in figures}) == 1):
        return unpaired
    outcomes = torch.stack([_outcome(figure) for figure in figures])
    common = outcomes[:, outcomes.isfinite().all(dim=0)]
    n = common.shape[1]
    if 2 * n < min(figure["examples"] for figure in figures):  # too few in common
        return unpaired
    first, second = common[: len(mine)].mean(dim=0), common[len(mine) :].mean(dim=0)
    error = paired_error(first, second) or 1 / n  # agreement on n images is no proof
    runs = (common[: len(mine)], common[len(mine) :])
    noise = sum(float(side.var(dim=0).mean()) / len(side) for side in runs if len(side) > 1)
    return Difference(float((first - second).mean()), error, True, noise / n)


def share_error(share: float, total: int) -> float:
    """Return the standard error of a share of ``total`` examples."""
    return math.sqrt(max(share * (1 - share), 0) / total)


def paired_error(mine: Tensor, other: Tensor) -> float:
    """Return the standard error of the difference of two accuracies on the same n examples.

    If only ``mine`` is right on b examples and only ``other`` on c, it is √(b + c − (b − c)²/n) / n. Outcomes (n,) may
    be means over several networks.
    """
    return float((mine.double() - other.double()).std(correction=0)) / math.sqrt(len(mine))


@dataclass(frozen=True)
class Measured:
    """A value measured with several seeds, accuracies in percent; ``figures`` are the records of an accuracy."""

    values: tuple[float, ...]
    figures: tuple[Figure, ...] = ()

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Standard deviation over seeds; None for a single seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def error(self) -> float:
        """Standard error of the mean over seeds; 0 for a single seed."""
        return (self.std or 0.0) / math.sqrt(len(self.values))

    def above(self, other: Measured) -> Difference:
        """Return the difference to ``other`` in its own unit, paired by image if possible."""
        images = difference(self.figures, other.figures)
        value = 100 * images.value if images.paired else self.mean - other.mean
        by_image = 1e4 * (images.error**2 - images.run_noise)
        return Difference(value, joint_error(self.error**2 + other.error**2, by_image), images.paired)


def joint_error(of_runs: float, of_images: float) -> float:
    """Return the standard error over runs and images of a difference of means, from two variances of it.

    Args:
        of_runs: from run to run, on the same images.
        of_images: from image to image, less what runs alone bring about, which ``of_runs`` contains.
    """
    return math.sqrt(of_runs + max(0.0, of_images))


def _images(figure: Figure) -> tuple[Any, ...]:
    """Return what identifies the set of images, or the larger set that they are part of."""
    whole = figure.get("among") or figure
    return whole.get("fingerprint"), whole["examples"], *sorted(figure.get("corruptions", ()))


def _outcome(figure: Figure) -> Tensor:
    """Return (n,) in [0, 1]: whether each image survived, or the share of its corruptions; NaN if not evaluated."""
    n = int(figure["examples"])
    if figure.get("survived"):
        values = unpack(figure["survived"], n).double()
    else:
        values = unpack_counts(figure["kept"], n).double() / (SEVERITIES * int(figure["over"]))
    among = figure.get("among")
    if not among:
        return values
    outcome = torch.full((int(among["examples"]),), torch.nan, dtype=torch.float64)
    outcome[unpack(among["chosen"], len(outcome))] = values
    return outcome
