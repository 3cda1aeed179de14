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
from bullettrain.evaluation.statistics import paired_error, share_error

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

    It is paired, and over the images that all were judged on, where all know which images of the same set survived;
    else images are taken as if they were others for either. With no ``other`` it is ``mine`` itself.
    """
    figures = (*mine, *other)
    sets = {_images(figure) for figure in figures}
    if mine and other and len(sets) == 1 and all(figure.get("survived") or figure.get("kept") for figure in figures):
        outcomes = torch.stack([_outcome(figure) for figure in figures])
        common = outcomes[:, outcomes.isfinite().all(dim=0)]
        if common.shape[1]:
            ours, theirs = common[: len(mine)].mean(dim=0), common[len(mine) :].mean(dim=0)
            return Difference(float((ours - theirs).mean()), paired_error(ours, theirs), True)
    means: list[float] = []
    errors: list[float] = []
    for side in (mine, other):
        means.append(statistics.fmean(figure["accuracy"] for figure in side) if side else 0.0)
        errors.append(share_error(means[-1], side[0]["examples"]) if side else 0.0)
    return Difference(means[0] - means[1], math.hypot(*errors), False)


def _images(figure: Figure) -> tuple[Any, ...]:
    """What tells sets of images apart; of a part it is the set that it is a part of."""
    whole = figure.get("among") or figure
    return whole.get("fingerprint"), whole["examples"], *sorted(figure.get("corruptions", ()))


def _outcome(figure: Figure) -> Tensor:
    """(n,) in [0, 1]: whether each image survived, or under what part of its corruptions; NaN: it was not judged."""
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
