"""Detection of failed training: a diverged loss, a network always wrong or at chance, catastrophic overfitting."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bullettrain.data import ImageSet
from bullettrain.evaluation.results import wilson
from bullettrain.formatting import attack_name, percent, plain
from bullettrain.objectives import AdversarialObjective
from bullettrain.step import BulletTrain
from bullettrain.training.metrics import Sums

HIGH_ABOVE_CHANCE = 0.35
"""Accuracy under the training attack, above chance, from which on the PGD-10 probe is compared with it."""
NEAR_ZERO, VERY_LOW_SHARE, LOW_SHARE = 0.05, 0.2, 1 / 3
"""Probe accuracies that mean collapse: NEAR_ZERO or VERY_LOW_SHARE of the accuracy under the training attack at once,
LOW_SHARE of it after two epochs in a row. Sound runs drop to a share of 0.3 for one epoch, of 0.43 for two."""
MIN_WRONG_EXAMPLES = 1000
"""Examples in a row without a correct prediction that mean collapse; fewer can be chance."""
ATTACKED_FACTOR = 20
"""Multiplies MIN_WRONG_EXAMPLES if only attacked examples are counted: an untrained network gets all of them wrong."""


HARDLY_FALLEN = 0.9
"""Share of the first epoch's loss from which on the last one's counts as hardly fallen."""


class CollapseError(RuntimeError):
    """The run has collapsed. The message says how."""


def look_at_loss(sums: Sums) -> str | None:
    """Return a message if the loss is not finite."""
    if math.isfinite(sums["loss"]):
        return None
    return "the loss is NaN or infinite; lower the learning rate, or clip gradients (--set optimizer.clip=1)"


class WrongStreak:
    """Detects a long series of examples that are all predicted wrong."""

    def __init__(self, engine: BulletTrain) -> None:
        # With selection="last" the categories are an epoch old.
        by_category = engine.needs_selection and not engine.selects_by_history
        self.key = "outlier" if by_category else "clean" if engine.objective.has_clean_logits else "robust_hits"
        self.attacked = isinstance(engine.objective, AdversarialObjective) and self.key == "robust_hits"
        self.examples = 0.0

    def look(self, sums: Sums) -> str | None:
        """Add the sums of some steps. Return a message if the series has become too long."""
        examples, correct = sums["examples"], sums[self.key]
        if self.key == "outlier":
            correct = examples - correct
        self.examples = 0.0 if correct else self.examples + examples
        if self.examples < MIN_WRONG_EXAMPLES * (ATTACKED_FACTOR if self.attacked else 1):
            return None
        if self.attacked:
            return "no attacked example is classified correctly; lower the learning rate, or method.eps"
        return "every example has become an outlier: the network classifies none correctly; lower the learning rate"


def low_probe(robust_accuracy: float, probe: float | None, *, classes: int, share: float = LOW_SHARE) -> bool:
    """Return whether PGD-10 breaks far more examples than the training attack does.

    Args:
        robust_accuracy: under the training attack, over an epoch.
        probe: under PGD-10, on some training images after the epoch; None if it was not measured.
        classes: number of classes.
        share: the probe is low up to this share of ``robust_accuracy``.
    """
    if probe is None or robust_accuracy < 1 / classes + HIGH_ABOVE_CHANCE:
        return False
    return probe <= max(NEAR_ZERO, share * robust_accuracy)


def look_at_epoch(robust_accuracy: float, probe: float | None, *, classes: int, low_before: bool = False) -> str | None:
    """Return a message on catastrophic overfitting: the training attack fails, but PGD-10 does not.

    Args:
        robust_accuracy, probe, classes: as for :func:`low_probe`.
        low_before: whether the probe was low after the previous epoch, too.
    """
    share = LOW_SHARE if low_before else VERY_LOW_SHARE
    if probe is None or not low_probe(robust_accuracy, probe, classes=classes, share=share):
        return None
    return (
        f"catastrophic overfitting: {100 * robust_accuracy:.0f} % of the training attacks fail, but PGD-10 breaks "
        f"all but {100 * probe:.0f} % of a probe; train against a stronger attack (method.boundary, step_size)"
    )


def look_at_test(weights: str, accuracy: float, images: ImageSet, losses: Sequence[float] = ()) -> str | None:
    """Return a message if clean test accuracy is that of chance.

    It is if its 95 % interval reaches down to the share of the largest class: always answering that does as well.

    Args:
        weights: name of the weights.
        accuracy: clean, on all test images.
        images: the test images.
        losses: mean training loss of each epoch, as far as it is known.
    """
    n, counts = len(images), images.labels.bincount()
    largest = int(counts.argmax())
    share = float(counts[largest]) / n
    if wilson(accuracy * n, n)[0] > share:
        return None
    stuck = bool(losses) and losses[-1] > HARDLY_FALLEN * losses[0]
    mend = "the training loss has hardly fallen: train longer, or try another" if stuck else "train longer, or lower"
    return plain(
        f"no better than chance: the {weights} weights are right on {percent(accuracy)} of {n} clean test images, and "
        f"always answering {images.classes[largest]!r} on {percent(share)}; {mend} --lr, or add images"
    )


def look_at_robustness(weights: str, clean: float, attack: str, robust: float) -> str | None:
    """Return a message if a network that was trained against attacks loses nearly every test image to one.

    Args:
        weights: name of the weights.
        clean: clean accuracy, above chance.
        attack: name of the attack.
        robust: accuracy under it.
    """
    if robust > NEAR_ZERO:
        return None
    return plain(
        f"not robust: the {weights} weights are right on {percent(clean)} of the clean test images, but on "
        f"{percent(robust)} under {attack_name(attack)}; train longer, against more steps (method.boundary), or with a "
        f"smaller --eps"
    )
