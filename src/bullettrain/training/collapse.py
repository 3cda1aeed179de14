"""Training that has gone wrong, noticed while it runs."""

from __future__ import annotations

import math

from bullettrain.objectives import AdversarialObjective
from bullettrain.step import BulletTrain
from bullettrain.training.metrics import Sums

HIGH_ABOVE_CHANCE, NEAR_ZERO, PROBE_SHARE = 0.35, 0.05, 0.2
"""Accuracy on the training attack, above chance, that counts as high; on the PGD-10 probe as none at all; and the part
of the former that the probe has to keep. Sound runs keep two fifths and more at every epoch."""
MIN_WRONG_EXAMPLES = 1000
"""Examples without a single correct one before a run is given up: fewer can be chance."""
ATTACKED_FACTOR = 20
"""So many times more where only attacked examples are looked at: all of them are lost while a network knows little."""


class CollapseError(RuntimeError):
    """The run has collapsed; the message says how."""


def look_at_loss(counts: Sums) -> str | None:
    """Whether the loss since the last look is a number."""
    if math.isfinite(counts.values["loss"]):
        return None
    return "the loss is NaN or infinite; lower the learning rate, or clip gradients (--set optimizer.clip=1)"


class WrongStreak:
    """Notices that nothing has been predicted right for a long time."""

    def __init__(self, engine: BulletTrain) -> None:
        # Of last logits who is wrong now is known an epoch later.
        by_class = engine.selects and not engine.selects_by_last
        self.key = "outlier" if by_class else "clean" if engine.objective.sees_clean else "robust_hits"
        self.attacked = isinstance(engine.objective, AdversarialObjective) and self.key == "robust_hits"
        self.examples = 0.0

    def look(self, counts: Sums) -> str | None:
        """Fold in some steps; what is wrong, if they and those before were all wrong."""
        examples, right = counts.values["examples"], counts.values[self.key]
        if self.key == "outlier":
            right = examples - right
        self.examples = 0.0 if right else self.examples + examples
        if self.examples < MIN_WRONG_EXAMPLES * (ATTACKED_FACTOR if self.attacked else 1):
            return None
        if self.attacked:
            return "no attacked example has been predicted right for long; lower the learning rate, or method.eps"
        return "every example has become an outlier: the network predicts nothing right; lower the learning rate"


def look_at_epoch(robust_accuracy: float, probe: float | None, *, classes: int) -> str | None:
    """Catastrophic overfitting: safe from the training attack, helpless against ten steps of PGD."""
    if probe is None or robust_accuracy < 1 / classes + HIGH_ABOVE_CHANCE:
        return None
    if probe <= max(NEAR_ZERO, PROBE_SHARE * robust_accuracy):
        return (
            f"catastrophic overfitting: {100 * robust_accuracy:.0f} % of the training attacks fail, but PGD-10 breaks "
            f"all but {100 * probe:.0f} % of a probe; train against a stronger attack (method.boundary, step_size)"
        )
    return None
