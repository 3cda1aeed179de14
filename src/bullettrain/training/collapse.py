"""Training that has gone wrong, noticed while it runs."""

from __future__ import annotations

import math

from bullettrain.training.tally import Counts

ABOVE_CHANCE, NEAR_ZERO = 0.35, 0.05
"""Accuracy on the training attack, above chance, that counts as high; and on the PGD-10 probe as none at all."""
ENOUGH = 1000
"""Examples without a single correct one before a run is given up: fewer can be chance."""


class CollapseError(RuntimeError):
    """The run has collapsed; the message says how."""


def look_at_steps(counts: Counts) -> str | None:
    """What is wrong with the steps since the last look, if anything."""
    if not math.isfinite(counts.sums["loss"]):
        return "the loss is NaN or infinite; lower the learning rate, or clip gradients (--set optimizer.clip=1)"
    if counts.sums["examples"] >= ENOUGH and counts.sums["outlier"] == counts.sums["examples"]:
        return "every example has become an outlier: the network predicts nothing right; lower the learning rate"
    return None


def look_at_epoch(robust_accuracy: float, probe: float | None, *, classes: int) -> str | None:
    """Catastrophic overfitting: safe from the training attack, helpless against ten steps of PGD."""
    if probe is not None and robust_accuracy >= 1 / classes + ABOVE_CHANCE and probe <= NEAR_ZERO:
        return (
            f"catastrophic overfitting: {100 * robust_accuracy:.0f} % of the training attacks fail, but PGD-10 breaks "
            f"all but {100 * probe:.0f} % of a probe; use more steps (--set method.boundary=10)"
        )
    return None
