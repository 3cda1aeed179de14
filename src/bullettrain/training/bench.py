"""Seconds beside counted work: the same steps in several engines, with and without BulletTrain, in one run."""

from __future__ import annotations

import gc
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bullettrain.attacks import frozen
from bullettrain.checkpoint_paths import weights_file
from bullettrain.config import Config, ConfigError
from bullettrain.cost import theoretical_speedup
from bullettrain.data import ImageSet
from bullettrain.engine.phases import Batch, Runner
from bullettrain.loading import misfit
from bullettrain.mining import Category
from bullettrain.processes import Place
from bullettrain.run_folder import SHARES, RunFolder, environment, read_weights
from bullettrain.step import BulletTrain
from bullettrain.terminal import duration
from bullettrain.training.trainer import Trainer
from bullettrain.validation import instead

logger = logging.getLogger(__name__)

ENGINES = {
    "eager": {"engine": "eager", "compile": False, "attack_group": 1},
    "graphs": {"engine": "graphs", "compile": False},
    "compile": {"engine": "graphs", "compile": True},
}
METHODS = ("baseline", "bullettrain")
LONG_SECONDS = 60.0
"""Of training before the timing from which on it is said how long that will be."""
PHASES = dict.fromkeys(("select", "allocate", "target"), "select") | dict.fromkeys(
    ("places", "attack_step", "refresh"), "attack"
)
"""What phases are counted to; the others update."""
Shares = tuple[float, float, float]
"""Of outlier, boundary and robust examples."""


@dataclass(frozen=True)
class BenchRow:
    """One engine, with or without BulletTrain."""

    engine: str
    method: str
    step_ms: float
    """Of one mini-batch; the median of the repeats."""
    spread_ms: float
    """Largest less smallest of the repeats."""
    select_ms: float | None
    attack_ms: float | None
    update_ms: float | None
    epoch_seconds: float
    examples_per_second: float
    tflops: float
    """Counted passes × the network's forward, a second."""
    memory_gib: float | None
    """Peak on the GPU, of this case alone."""
    capture_seconds: float
    """Compilation and captures."""
    work: float
    """Passes an example."""
    outlier: float
    boundary: float
    robust: float
    theoretical_speedup: float | None = None
    work_speedup: float | None = None
    wall_clock_speedup: float | None = None


def bench(
    config: Config,
    place: Place,
    data: tuple[ImageSet, ImageSet, ImageSet],
    *,
    engines: list[str],
    train_steps: int,
    steps: int,
    repeats: int,
    shares: Shares | None = None,
    checkpoint: Path | None = None,
) -> dict[str, Any]:
    """Time every engine from the same trained state; see the fields of :class:`BenchRow`.

    Args:
        config, place, data: of the run.
        engines: of ENGINES.
        train_steps: steps of training first, so that the shares are a trained network's.
        steps, repeats: mini-batches timed at once, and how often.
        shares: impose these fractions of outlier, boundary and robust examples instead.
        checkpoint: weights to start from instead of training.
    """
    for engine in engines:
        if engine not in ENGINES:
            raise ConfigError(f"there is no engine {engine!r}{instead(engine, ENGINES)}")
    if shares is None and config.method.selection == "last":
        _check_seen(config, len(data[0]), train_steps, checkpoint)
    if checkpoint is not None:
        train_steps = min(train_steps, 30)  # F_R still has to find its level
    rows: list[BenchRow] = []
    notes: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make = partial(make_trainer, config, place, data, Path(folder))
        state = _train(
            make("graphs" if place.device.type == "cuda" else "eager", "bullettrain"), train_steps, checkpoint
        )
        gc.collect()
        for engine in engines:
            cases = [_Case(make, engine, method, state, shares, steps) for method in METHODS]
            for _ in range(repeats):
                for case in cases:  # in turns, so that a device that slows down does so for both
                    case.time()
            baseline, mined = (case.row() for case in cases)
            rows += [baseline, _with_speedups(mined, baseline, config)]
            notes[engine] = list(dict.fromkeys(note for case in cases for note in case.trainer.recorder.notes))
            for row in rows[-2:]:
                logger.info("%s %s: %.2f ms a step, %.2f passes an example", engine, row.method, row.step_ms, row.work)
            del cases, case
            gc.collect()  # their graphs hold memory, in circles
    return {
        "config": config.to_dict(),
        "environment": environment(place.device),
        "shares": "imposed" if shares else "of the trained state",
        "train_steps": train_steps,
        "steps": steps,
        "repeats": repeats,
        "rows": [asdict(row) for row in rows],
        "notes": notes,
    }


def make_trainer(
    config: Config, place: Place, data: tuple[ImageSet, ImageSet, ImageSet], folder: Path, engine: str, method: str
) -> Trainer:
    """A trainer of an engine, with or without BulletTrain."""
    # What a long training comes to is what is timed; and what is chosen first stays.
    chosen = config.baseline() if method == "baseline" else config
    chosen = chosen.replace_section("training", **ENGINES[engine], cudnn_benchmark_after=0.0)
    return Trainer(chosen, RunFolder(folder), place, data)


def _check_seen(config: Config, examples: int, train_steps: int, checkpoint: Path | None) -> None:
    """ConfigError where last logits are to select, and hardly anybody would have any."""
    epochs = 2 * (examples // config.training.batch_size * config.training.replays)  # each leaves a few images out
    why = "selection=last knows of an example when it has been trained on"
    if checkpoint is not None:
        raise ConfigError(f"{why}, and weights alone do not say that: give --shares, or leave --checkpoint out")
    if train_steps < epochs:
        raise ConfigError(f"{why}: give --shares, or two epochs of training first, --train-steps {epochs}")


def impose(engine: BulletTrain, shares: Shares) -> None:
    """These fractions of outlier, boundary and robust examples from now on."""
    engine.separation = Imposed(shares)
    engine.history.score.fill_(0.1)  # as if all had been seen: who has not is on the boundary, whatever is imposed


@dataclass(frozen=True)
class Imposed:
    """A separation with given fractions of outlier, boundary and robust examples, by rank of the score."""

    shares: Shares
    over_batches = True
    """It takes several mini-batches at once, as the rule does."""

    def __call__(self, svar: Tensor, robust_fraction: float | Tensor) -> Tensor:
        """Categories like ``svar``, (m,) or (k, m)."""
        m, (outlier, boundary, _) = svar.shape[-1], self.shares
        rank = svar.argsort(dim=-1).argsort(dim=-1)
        category = torch.where(rank < round((outlier + boundary) * m), int(Category.BOUNDARY), int(Category.ROBUST))
        return torch.where(rank < round(outlier * m), int(Category.OUTLIER), category)


def _train(trainer: Trainer, steps: int, checkpoint: Path | None) -> dict[str, Any]:
    """Weights, F_R and history that every case starts from."""
    if checkpoint is not None:
        file = weights_file(checkpoint)
        tensors, _ = read_weights(file)
        if wrong := misfit(trainer.network, tensors):
            raise ConfigError(f"{file} does not fit {trainer.config.network.name}: {wrong}")
        trainer.network.load_state_dict(tensors)
    logger.info("training for %d steps first", steps)
    batches, began = units(trainer), time.perf_counter()
    for taken in range(-(-steps // trainer.stepper.unit)):
        trainer.take(next(batches))
        if taken == 1:  # the first one compiles, or allocates
            left = (time.perf_counter() - began) / (2 * trainer.stepper.unit) * steps
            if left > LONG_SECONDS:
                less = "--train-steps, --steps and --repeats make it shorter"
                logger.info("that is some %s, and the timing comes after it: %s", duration(left), less)
    return {
        "weights": {key: value.clone() for key, value in trainer.network.state_dict().items()},
        "robust_fraction": trainer.engine.robust_fraction.state_dict(),
        "history": trainer.engine.history.state_dict(),
    }


def units(trainer: Trainer) -> Iterator[list[Batch]]:
    """Units of full mini-batches, for ever."""
    full = len(trainer.train_set) // trainer.config.training.batch_size
    size = trainer.stepper.unit
    if full < size:
        raise ConfigError(f"an epoch has {full} full mini-batches, fewer than attack_group={size}; give a smaller one")
    epoch = 0
    while True:
        unit: list[Batch] = []
        for index, (x, y) in enumerate(trainer.loader.epoch(epoch)):
            if index == full // size * size:
                break
            unit.append(trainer.batch(x, y, epoch, index))
            if len(unit) == size:
                yield unit
                unit = []
        epoch += 1
        trainer.at.index = 0


class Timed:
    """A run whose steps are timed: warmed up, compiled and captured.

    Args:
        trainer: as its steps are to find it.
        shares: impose these fractions of outlier, boundary and robust examples.
        steps: mini-batches timed at once.
    """

    def __init__(self, trainer: Trainer, shares: Shares | None, steps: int) -> None:
        self.trainer, self.device, unit = trainer, trainer.place.device, trainer.stepper.unit
        if shares is not None:
            impose(trainer.engine, shares)
        trainer.rate = lambda step: 1e-6  # type: ignore[method-assign] # timing must not change the state much
        self.units, self.turns = units(trainer), max(1, steps // unit)
        self.per_step: list[float] = []
        """Milliseconds a mini-batch, one a repeat."""
        warm_ups = max(3, self.turns // 2)
        self.first = self._seconds(warm_ups)  # also captures the sizes that occur
        self.warmed = warm_ups * unit
        trainer.metrics.read(False)

    def time(self) -> None:
        """Once more."""
        self.per_step.append(1000 * self._seconds(self.turns) / (self.turns * self.trainer.stepper.unit))

    @property
    def step_ms(self) -> float:
        """Of one mini-batch; the median of the repeats."""
        return statistics.median(self.per_step)

    @property
    def spread_ms(self) -> float:
        """Largest less smallest of the repeats."""
        return max(self.per_step) - min(self.per_step)

    @property
    def epoch_seconds(self) -> float:
        """Of as many mini-batches as an epoch has, replays among them."""
        training = self.trainer.config.training
        return self.step_ms / 1000 * training.replays * len(self.trainer.train_set) / training.batch_size

    @property
    def capture_seconds(self) -> float:
        """Of compilation and captures; without graphs, what the first steps took longer."""
        usual = self.step_ms / 1000 * self.warmed
        return self.trainer.stepper.capture_seconds or max(self.first - usual, 0.0)

    def _seconds(self, turns: int) -> float:
        wait_for(self.device)
        began = time.perf_counter()
        for _ in range(turns):
            self.trainer.take(next(self.units))  # with what a run does besides: drawing, cropping, flipping, noise
        wait_for(self.device)
        return time.perf_counter() - began


class _Case(Timed):
    """One engine, with or without BulletTrain, from a trained state."""

    def __init__(
        self,
        make: Callable[[str, str], Trainer],
        engine: str,
        method: str,
        state: dict[str, Any],
        shares: Shares | None,
        steps: int,
    ) -> None:
        before = _memory(peak=False)
        self.engine, self.method = engine, method
        trainer = make(engine, method)
        trainer.network.load_state_dict(state["weights"])
        trainer.engine.robust_fraction.load_state_dict(state["robust_fraction"])
        trainer.engine.history.load_state_dict(state["history"])
        super().__init__(trainer, shares, steps)
        self.memory = _memory(peak=True) - before

    def row(self) -> BenchRow:
        """What was found."""
        trainer = self.trainer
        figures = trainer.figures(trainer.metrics.read(False))
        phases = {} if trainer.engine.objective.whole_step else self._phases()
        m, seconds = trainer.config.training.batch_size, self.step_ms / 1000
        return BenchRow(
            engine=self.engine,
            method=self.method,
            step_ms=self.step_ms,
            spread_ms=self.spread_ms,
            select_ms=phases.get("select"),
            attack_ms=phases.get("attack"),
            update_ms=phases.get("update"),
            epoch_seconds=self.epoch_seconds,
            examples_per_second=m / seconds,
            tflops=figures["work"] * m * forward_flops(trainer) / seconds / 1e12,
            memory_gib=self.memory / 2**30 if self.device.type == "cuda" else None,
            capture_seconds=self.capture_seconds,
            **{name: figures[name] for name in (*SHARES, "work")},
        )

    def _phases(self) -> dict[str, float]:
        """Milliseconds a mini-batch of selecting, attacking and updating."""
        fast = self.trainer.stepper.fast
        runner, timed = fast.runner, _TimedRunner(fast.runner, self.device)
        fast.runner = timed
        self._seconds(self.turns)
        fast.runner = runner
        totals = dict.fromkeys(("select", "attack", "update"), 0.0)
        for name, before, after in timed.marks:
            totals[name] += before.elapsed_time(after) if timed.cuda else 1000 * (after - before)
        return {name: total / (self.turns * self.trainer.stepper.unit) for name, total in totals.items()}


class _TimedRunner:
    """A runner that times the phases which another one runs; device events around each."""

    def __init__(self, runner: Runner, device: torch.device) -> None:
        self.runner, self.cuda = runner, device.type == "cuda"
        self.load = runner.load
        self.marks: list[tuple[str, Any, Any]] = []

    def __call__(self, phase: Callable[..., Any], *args: Any) -> Any:
        before = self._mark()
        result = self.runner(phase, *args)
        self.marks.append((PHASES.get(phase.__name__, "update"), before, self._mark()))
        return result

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _memory(*, peak: bool) -> int:
    """Bytes on the GPU: those taken now, from which the peak is counted anew, or the peak since then."""
    if not torch.cuda.is_available():
        return 0
    if peak:
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def forward_flops(trainer: Trainer) -> float:
    """Floating-point operations of one example's forward."""
    image = trainer.train_set.images[:1].to(trainer.place.device).float() / 255
    with frozen(trainer.network), torch.no_grad(), FlopCounterMode(display=False) as counter:
        trainer.network(image)
    return float(counter.get_total_flops())


def _with_speedups(row: BenchRow, baseline: BenchRow, config: Config) -> BenchRow:
    share = {name: getattr(row, name) for name in SHARES}
    views = config.method.build_objective().num_views
    return replace(
        row,
        theoretical_speedup=theoretical_speedup(config.method.budget(), **share, views=views)
        if config.method.allocation == "categories"
        else None,
        work_speedup=baseline.work / row.work,
        wall_clock_speedup=baseline.step_ms / row.step_ms,
    )


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
