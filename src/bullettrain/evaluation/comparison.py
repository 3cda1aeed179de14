"""Two accuracies beside each other: how far they are apart, on the same images where that can be told."""

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

Figure = Mapping[str, Any]
"""An accuracy as records keep it: `accuracy`, `examples`, and where it is known which images survived, the images'
`fingerprint` and `survived`, or, under corruptions, `kept`; where they are a part of a larger set, `among`."""


@dataclass(frozen=True)
class Difference:
    """Of two mean accuracies, as shares."""

    value: float
    error: float
    """Standard error, from the images alone."""
    paired: bool
    """Whether both are of the same images, image by image."""


def difference(mine: Sequence[Figure], other: Sequence[Figure]) -> Difference:
    """How far ``mine`` is above ``other``, each of one network or several.

    It is paired, and over the images that all were evaluated on, where all know which images of the same set survived
    and share at least half of the fewest; else images are taken as if they were others for either. With no ``other``
    it is ``mine`` itself.
    """
    means: list[float] = []
    errors: list[float] = []
    for side in (mine, other):
        means.append(statistics.fmean(figure["accuracy"] for figure in side) if side else 0.0)
        errors.append(share_error(means[-1], min(figure["examples"] for figure in side)) if side else 0.0)
    unpaired = Difference(means[0] - means[1], math.hypot(*errors), False)
    figures = (*mine, *other)
    known = all(figure.get("survived") or figure.get("kept") for figure in figures)
    if not (mine and other and known and len({_images(figure) for figure in figures}) == 1):
        return unpaired
    outcomes = torch.stack([_outcome(figure) for figure in figures])
    common = outcomes[:, outcomes.isfinite().all(dim=0)]
    n = common.shape[1]
    if 2 * n < min(figure["examples"] for figure in figures):  # a handful that all happen to share
        return unpaired
    ours, theirs = common[: len(mine)].mean(dim=0), common[len(mine) :].mean(dim=0)
    error = paired_error(ours, theirs) or 1 / n  # that all agree on n images does not prove that they always do
    return Difference(float((ours - theirs).mean()), error, True)


def share_error(share: float, total: int) -> float:
    """Standard error of a share of ``total`` examples."""
    return math.sqrt(max(share * (1 - share), 0) / total)


def paired_error(mine: Tensor, other: Tensor) -> float:
    """Standard error of the difference of two shares of the same examples, of which (n,) were right, or how often.

    Examples on which both agree say nothing of it: where ``mine`` alone is right on b and ``other`` alone on c, it is
    √(b + c − (b − c)²/n) / n. Outcomes may be means over several networks.
    """
    apart = mine.double() - other.double()
    n = len(apart)
    return math.sqrt(max(float(apart.square().sum() - apart.sum().square() / n), 0)) / n


@dataclass(frozen=True)
class Measured:
    """A figure over seeds, accuracies in percent; ``figures`` are what records keep of an accuracy, seed by seed."""

    values: tuple[float, ...]
    figures: tuple[Figure, ...] = ()

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Of the seeds, where there are several."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def error(self) -> float:
        """Standard error of the mean over the seeds, where there are some."""
        return (self.std or 0.0) / math.sqrt(len(self.values))

    def above(self, other: Measured) -> Difference:
        """How far it is above ``other``, in its own unit; of the same images where that is known."""
        images = difference(self.figures, other.figures)
        value = 100 * images.value if images.paired else self.mean - other.mean
        return Difference(value, math.hypot(self.error, other.error, 100 * images.error), images.paired)


def _images(figure: Figure) -> tuple[Any, ...]:
    """What tells sets of images apart; of a part it is the set that it is a part of."""
    whole = figure.get("among") or figure
    return whole.get("fingerprint"), whole["examples"], *sorted(figure.get("corruptions", ()))


def _outcome(figure: Figure) -> Tensor:
    """(n,) in [0, 1]: whether each image survived, or under what part of its corruptions; NaN: it was not evaluated."""
    n = int(figure["examples"])
    if figure.get("survived"):
        found = unpack(figure["survived"], n).double()
    else:
        found = unpack_counts(figure["kept"], n).double() / (SEVERITIES * int(figure["over"]))
    among = figure.get("among")
    if not among:
        return found
    outcome = torch.full((int(among["examples"]),), torch.nan, dtype=torch.float64)
    outcome[unpack(among["chosen"], len(outcome))] = found
    return outcome
