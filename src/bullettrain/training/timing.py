"""Time of training steps, in total or by phase, with a trained network's shares or imposed ones."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bullettrain.config import ConfigError
from bullettrain.engine.phases import Batch, Runner
from bullettrain.mining import Category
from bullettrain.step import BulletTrain
from bullettrain.training.steps import synchronize
from bullettrain.training.trainer import Trainer

PHASES = dict.fromkeys(("select", "allocate", "target"), "select_ms") | dict.fromkeys(
    ("packed", "attack_step"), "attack_ms"
)
"""Figure that each phase counts to; all others count to "update_ms"."""
Shares = tuple[float, float, float]
"""Fractions of outlier, boundary and robust examples."""


def impose(engine: BulletTrain, shares: Shares) -> None:
    """Impose fractions of outlier, boundary and robust examples on all further steps."""
    engine.separation = Imposed(shares)
    engine.history.score.fill_(0.1)  # an example without a score would be a boundary example


@dataclass(frozen=True)
class Imposed:
    """A separation with fixed fractions of outlier, boundary and robust examples, by rank of the score."""

    shares: Shares
    over_batches = True
    """It accepts scores (k, m) of several mini-batches."""

    def __call__(self, svar: Tensor, robust_fraction: float | Tensor) -> Tensor:
        """Return categories for scores (m,) or (k, m)."""
        m, (outlier, boundary, _) = svar.shape[-1], self.shares
        rank = svar.argsort(dim=-1).argsort(dim=-1)
        category = torch.where(rank < round((outlier + boundary) * m), int(Category.BOUNDARY), int(Category.ROBUST))
        return torch.where(rank < round(outlier * m), int(Category.OUTLIER), category)


def units(trainer: Trainer) -> Iterator[list[Batch]]:
    """Yield units of full mini-batches forever.

    Raises:
        ConfigError: an epoch has too few of them.
    """
    full = len(trainer.train_set) // trainer.config.training.batch_size
    size = trainer.stepper.unit
    if full < size:
        few = f"an epoch has {full} full mini-batches, fewer than the {size} that belong together"
        raise ConfigError(f"{few}; give a smaller batch_size or attack_group")
    for epoch in itertools.count():
        yield from itertools.islice(trainer.units(epoch), full // size)


class Timed:
    """Times the steps of a trainer, after a warm-up that compiles and captures.

    Args:
        trainer: takes the steps; its weights hardly change.
        shares: impose these fractions of outlier, boundary and robust examples.
        steps: mini-batches per timing.
    """

    memory = 0
    """Peak of GPU memory in bytes."""

    def __init__(self, trainer: Trainer, shares: Shares | None, steps: int) -> None:
        self.trainer, self.device, unit = trainer, trainer.place.device, trainer.stepper.unit
        if shares is not None:
            impose(trainer.engine, shares)
        trainer.rate = lambda position: 1e-6  # type: ignore[method-assign] # hardly changes the weights
        self.units, self.turns = units(trainer), max(1, steps // unit)
        self.per_step: list[float] = []
        """Milliseconds per mini-batch of each timing."""
        warm_ups = max(3, self.turns // 2)
        self.first = self.seconds(warm_ups)
        self.warmed = warm_ups * unit
        trainer.metrics.read(False)

    def time(self) -> None:
        """Time some steps, and add the result to ``per_step``."""
        self.per_step.append(1000 * self.seconds(self.turns) / (self.turns * self.trainer.stepper.unit))

    @property
    def step_ms(self) -> float:
        """Milliseconds per mini-batch, the median of the timings."""
        return statistics.median(self.per_step)

    @property
    def spread_ms(self) -> float:
        """Range of the timings."""
        return max(self.per_step) - min(self.per_step)

    @property
    def epoch_seconds(self) -> float:
        """Seconds of an epoch, replays included."""
        training = self.trainer.config.training
        return self.step_ms / 1000 * training.replays * len(self.trainer.train_set) / training.batch_size

    @property
    def capture_seconds(self) -> float:
        """Seconds of compilation and captures; without graphs, the extra time of the warm-up."""
        usual = self.step_ms / 1000 * self.warmed
        return self.trainer.stepper.capture_seconds or max(self.first - usual, 0.0)

    def seconds(self, turns: int) -> float:
        """Return the seconds of so many units, data augmentation and noise included."""
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(turns):
            self.trainer.take(next(self.units))
        synchronize(self.device)
        return time.perf_counter() - began


def phases_ms(timed: Timed) -> dict[str, float]:
    """Return milliseconds per mini-batch of selection, attack and update."""
    fast = timed.trainer.stepper.fast
    runner, timing = fast.runner, _TimedRunner(fast.runner, timed.device)
    fast.runner = timing
    timed.seconds(timed.turns)
    fast.runner = runner
    totals = dict.fromkeys(("select_ms", "attack_ms", "update_ms"), 0.0)
    for name, before, after in timing.marks:
        totals[name] += before.elapsed_time(after) if timing.cuda else 1000 * (after - before)
    return {name: total / (timed.turns * timed.trainer.stepper.unit) for name, total in totals.items()}


class _TimedRunner:
    """Wraps a runner and times each phase, with CUDA events on a GPU."""

    def __init__(self, runner: Runner, device: torch.device) -> None:
        self.runner, self.cuda = runner, device.type == "cuda"
        self.load = runner.load
        self.marks: list[tuple[str, Any, Any]] = []

    def __call__(self, phase: Callable[..., Any], *args: Any) -> Any:
        before = self._mark()
        result = self.runner(phase, *args)
        self.marks.append((PHASES.get(phase.__name__, "update_ms"), before, self._mark()))
        return result

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
