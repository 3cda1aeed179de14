"""Number of epochs that fit into a time limit, from the time of a few steps."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bullettrain.config import Config, ConfigError
from bullettrain.data import ImageSet, to_unit
from bullettrain.processes import Place
from bullettrain.run_folder import RunFolder
from bullettrain.terminal import duration
from bullettrain.training.evaluator import probe_images
from bullettrain.training.timing import Timed
from bullettrain.training.trainer import Trainer

logger = logging.getLogger(__name__)

TIMED_STEPS, REPEATS = 20, 3
SECOND_START = 0.5
"""Fraction of the compilation and capture time that the run takes again: compiled code is cached, graphs are not."""
REPORT_SECONDS = 2.0
USUAL_SHARES = (0.25, 0.33, 0.42)
"""Typical fractions of outlier, boundary and robust examples; for an untrained network nearly all are outliers."""


@dataclass(frozen=True)
class Timing:
    """Seconds that the parts of a run take."""

    start: float
    """Compilation and captures."""
    epoch: float
    """Steps, evaluation and checkpoint of an epoch."""
    end: float
    """Final evaluation and report."""

    def epochs(self, seconds: float) -> int:
        """Return the number of epochs, at least one, whose run comes nearest to ``seconds``."""
        return max(1, round((seconds - self.start - self.end) / self.epoch))

    def total(self, epochs: int) -> float:
        """Return the seconds of a run."""
        return self.start + epochs * self.epoch + self.end


def for_minutes(
    config: Config, minutes: float, place: Place, data: tuple[ImageSet, ImageSet, ImageSet], *, began: float
) -> Config:
    """Return the config with as many epochs as fit into ``minutes``, and its milestones scaled with them.

    Args:
        config: of the run.
        minutes: time limit for the whole command.
        place: device and processes.
        data: training, validation and test images.
        began: time.monotonic() when the command started.

    Raises:
        ConfigError: an epoch takes longer than that.
    """
    timing = measure(config, place, data)
    remaining = 60 * minutes - (time.monotonic() - began)
    epochs = place.largest(timing.epochs(remaining))  # processes have to agree
    if place.largest(int(timing.total(epochs) > 1.1 * remaining)):
        least = (time.monotonic() - began + timing.total(1)) / 60
        raise ConfigError(f"--minutes {minutes:g} is too short: an epoch and evaluation take {least:.2g} minutes")
    logger.info("%d epochs, in %s: %s an epoch", epochs, duration(timing.total(epochs)), duration(timing.epoch))
    part = epochs / config.training.epochs
    milestones = tuple(max(1, round(milestone * part)) for milestone in config.schedule.milestones)
    return config.replace_section("training", epochs=epochs).replace_section("schedule", milestones=milestones)


def measure(config: Config, place: Place, data: tuple[ImageSet, ImageSet, ImageSet]) -> Timing:
    """Time a few steps, evaluations on a few images and a checkpoint, in a temporary run."""
    logger.info("timing a few steps")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, RunFolder(Path(folder)), place, data)
        images, needed = len(data[0]), config.training.batch_size * trainer.stepper.unit
        if images < needed:
            wrong = f"--minutes times full mini-batches, and there are {images} training images for {needed} at once"
            smaller = max(1, images // (4 * trainer.stepper.unit))
            raise ConfigError(f"{wrong}; give --batch-size {smaller}, or --epochs instead")
        mined = trainer.needs_selection and config.method.separation == "quantile"
        timed = Timed(trainer, USUAL_SHARES if mined else None, TIMED_STEPS)
        for _ in range(REPEATS):
            timed.time()
        evaluator, network = trainer.evaluator, trainer.network
        sample = probe_images(trainer.test_set, config.evaluation.batch_size)
        with torch.no_grad():  # predictions as labels: attacks skip images that are misclassified
            labels = network.eval()(to_unit(sample.images.to(place.device))).argmax(dim=1)
        sample = dataclasses.replace(sample, labels=labels.to(sample.labels.device))
        quick = _seconds(lambda: evaluator.validation(network, sample)) / len(sample)
        checks = quick * (len(data[1]) + min(config.training.probe, len(data[0])))
        final = _seconds(lambda: evaluator.final(network, sample, "last")) * len(trainer.test_set) / len(sample)
        saving = _seconds(trainer.save)
    steps = timed.epoch_seconds
    if trainer.leave_out is not None:  # about half of the examples have a margin above the mean
        steps *= 1 - trainer.leave_out.until * trainer.leave_out.share / 2
    kept = 1 + bool(len(data[1])) + (trainer.average is not None)
    start = timed.capture_seconds * SECOND_START
    return Timing(start, steps + checks + saving, kept * final + REPORT_SECONDS)


def _seconds(function: Callable[[], object]) -> float:
    began = time.monotonic()
    function()
    return time.monotonic() - began
