"""How many epochs fit into so many minutes: a few steps are timed, and the rest is arithmetic."""

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
"""Part of the time of compiling and capturing that a run still takes after the timing has done it once: compiled code
is found again, graphs are captured anew."""
REPORT_SECONDS = 2.0
USUAL_SHARES = (0.25, 0.33, 0.42)
"""Of outlier, boundary and robust examples over a training; an untrained network takes nearly all for outliers."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a run's parts."""

    start: float
    """Until the first step can be taken: compiling and capturing."""
    epoch: float
    """An epoch's steps, evaluation and checkpoint."""
    end: float
    """The final evaluation and the report."""

    def epochs(self, seconds: float) -> int:
        """As many as come nearest to ``seconds`` in all, and at least one."""
        return max(1, round((seconds - self.start - self.end) / self.epoch))

    def total(self, epochs: int) -> float:
        """Seconds of a run of so many epochs."""
        return self.start + epochs * self.epoch + self.end


def for_minutes(
    config: Config, minutes: float, place: Place, data: tuple[ImageSet, ImageSet, ImageSet], *, began: float
) -> Config:
    """The config with as many epochs as fit into ``minutes``, and its milestones at the same part of them.

    Args:
        config, place, data: of the run.
        minutes: for all that the user waits for, from ``began`` on.
        began: of time.monotonic().

    Raises:
        ConfigError: an epoch takes longer than that.
    """
    timing = measure(config, place, data)
    left = 60 * minutes - (time.monotonic() - began)
    epochs = timing.epochs(left)
    if timing.total(epochs) > 1.1 * left:
        least = (time.monotonic() - began + timing.total(1)) / 60
        raise ConfigError(
            f"--minutes {minutes:g} is too short: an epoch and the evaluation take {least:.2g}; give more"
        )
    logger.info("%d epochs, in %s: %s an epoch", epochs, duration(timing.total(epochs)), duration(timing.epoch))
    part = epochs / config.training.epochs
    milestones = tuple(max(1, round(milestone * part)) for milestone in config.schedule.milestones)
    return config.replace_section("training", epochs=epochs).replace_section("schedule", milestones=milestones)


def measure(config: Config, place: Place, data: tuple[ImageSet, ImageSet, ImageSet]) -> Timing:
    """Time a few steps of a run, its evaluations on a few images and a checkpoint, and throw the run away."""
    images, batch_size = len(data[0]), config.training.batch_size * config.training.attack_group
    if images < batch_size:
        raise ConfigError(
            f"--minutes times full mini-batches, and there are {images} training images for {batch_size} at once; give "
            f"--batch-size {max(1, images // (4 * config.training.attack_group))}, or --epochs instead"
        )
    logger.info("timing a few steps")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, RunFolder(Path(folder)), place, data)
        mined = trainer.selects and config.method.separation == "quantile"
        timed = Timed(trainer, USUAL_SHARES if mined else None, TIMED_STEPS)
        for _ in range(REPEATS):
            timed.time()
        evaluator, network = trainer.evaluator, trainer.network
        sample = probe_images(trainer.test_set, config.evaluation.batch_size)
        with torch.no_grad():  # its own predictions for labels: else hardly an image would be worth an attack
            labels = network.eval()(to_unit(sample.images.to(place.device))).argmax(dim=1)
        sample = dataclasses.replace(sample, labels=labels.to(sample.labels.device))
        quick = _seconds(lambda: evaluator.validation(network, sample)) / len(sample)
        checks = quick * (len(data[1]) + min(config.training.probe, len(data[0])))
        final = _seconds(lambda: evaluator.final(network, sample, "last")) * len(trainer.test_set) / len(sample)
        saving = _seconds(trainer.save)
    kept = 1 + bool(len(data[1])) + (trainer.average is not None)
    start = timed.capture_seconds * SECOND_START
    return Timing(start, timed.epoch_seconds + checks + saving, kept * final + REPORT_SECONDS)


def _seconds(do: Callable[[], object]) -> float:
    began = time.monotonic()
    do()
    return time.monotonic() - began
