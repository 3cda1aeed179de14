"""Benchmark: time and counted work of training steps in several engines, with and without BulletTrain."""

from __future__ import annotations

import gc
import logging
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from bullettrain.attacks import frozen
from bullettrain.config import Config, ConfigError
from bullettrain.data import ImageSet
from bullettrain.loading import fill, find_source, read_state
from bullettrain.processes import Place
from bullettrain.run_folder import SHARES, RunFolder, environment
from bullettrain.terminal import duration
from bullettrain.training.metrics import speedups
from bullettrain.training.timing import Shares, Timed, phases_ms, units
from bullettrain.training.trainer import Trainer
from bullettrain.validation import check_known

logger = logging.getLogger(__name__)

ENGINES = {
    "eager": {"engine": "eager", "compile": False, "attack_group": 1},
    "graphs": {"engine": "graphs", "compile": False},
    "compile": {"engine": "graphs", "compile": True},
}
METHODS = ("baseline", "bullettrain")
LONG_SECONDS = 60.0
"""Estimated seconds of training before the timing from which on the estimate is logged."""
Data = tuple[ImageSet, ImageSet, ImageSet]


def bench(
    config: Config,
    place: Place,
    data: Data,
    *,
    engines: list[str],
    train_steps: int,
    steps: int,
    repeats: int,
    shares: Shares | None = None,
    checkpoint: Path | None = None,
) -> dict[str, Any]:
    """Time every engine from the same trained state, with and without BulletTrain.

    Args:
        config: of the run.
        place: device and processes.
        data: training, validation and test images.
        engines: names in ENGINES.
        train_steps: steps of training before the timing, so that the shares are those of a trained network.
        steps: mini-batches per timing.
        repeats: number of timings; the median counts.
        shares: impose these fractions of outlier, boundary and robust examples instead.
        checkpoint: weights to start from instead of training.

    Returns:
        A JSON object whose "rows" are two per engine: the baseline and BulletTrain.

    Raises:
        ConfigError: an engine is unknown, or ``train_steps`` are too few for the method.
    """
    for engine in engines:
        check_known(engine, ENGINES, "there is no engine", error=ConfigError)
    if shares is None and config.method.remembers:
        _check_history(config, len(data[0]), train_steps, checkpoint)
    if checkpoint is not None:
        train_steps = min(train_steps, 30)  # F_R still has to settle
    rows: list[dict[str, Any]] = []
    notes: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        first = "graphs" if place.device.type == "cuda" else "eager"
        state = _train(make_trainer(config, place, data, Path(folder), first, "bullettrain"), train_steps, checkpoint)
        gc.collect()  # CUDA graphs hold memory in reference cycles
        for engine in engines:
            make = partial(make_trainer, config, place, data, Path(folder), engine)
            timed, notes[engine] = _time_methods(make, state, shares, steps, repeats)
            for row in timed:
                rows.append({"engine": engine, **row})
                figures = row["method"], row["step_ms"], row["work"]
                logger.info("%s %s: %.2f ms a step, %.2f passes an example", engine, *figures)
            gc.collect()
    return {
        "config": config.to_dict(),
        "environment": environment(place.device),
        "shares": "imposed" if shares else "of the trained state",
        "train_steps": train_steps,
        "steps": steps,
        "repeats": repeats,
        "rows": rows,
        "notes": notes,
    }


def make_trainer(config: Config, place: Place, data: Data, folder: Path, engine: str, method: str) -> Trainer:
    """Return a trainer for an engine, with BulletTrain or its baseline."""
    # Tune cuDNN at once: a long training is tuned for nearly all of its time.
    chosen = config.baseline() if method == "baseline" else config
    chosen = chosen.replace_section("training", **ENGINES[engine], cudnn_benchmark_after=0.0)
    return Trainer(chosen, RunFolder(folder), place, data)


def _check_history(config: Config, examples: int, train_steps: int, checkpoint: Path | None) -> None:
    """Raise ConfigError if the method needs a history of examples that ``train_steps`` would not give."""
    needed = 2 * (examples // config.training.batch_size * config.training.replays)  # two epochs of full batches
    method = config.method
    which = "selection=last" if method.selection == "last" else f"allocation={method.allocation}"
    why = f"{which} needs a history of the examples"
    if checkpoint is not None:
        raise ConfigError(f"{why}, which a checkpoint's weights do not hold: give --shares, or leave --checkpoint out")
    if train_steps < needed:
        raise ConfigError(f"{why}: give --shares, or two epochs of training first, --train-steps {needed}")


def _train(trainer: Trainer, steps: int, checkpoint: Path | None) -> dict[str, Any]:
    """Train for some steps and return the weights, F_R and history that every case starts from."""
    if checkpoint is not None:
        file = find_source(checkpoint).file or checkpoint
        fill(trainer.network, read_state(file)[0], file, trainer.config.network.name)
    logger.info("training for %d steps first", steps)
    batches, began = units(trainer), time.perf_counter()
    for index in range(-(-steps // trainer.stepper.unit)):
        trainer.take(next(batches))
        if index == 1:
            estimate = (time.perf_counter() - began) / (2 * trainer.stepper.unit) * steps
            if estimate > LONG_SECONDS:
                hint = "--train-steps, --steps and --repeats make it shorter"
                logger.info("about %s of training, and then the timing: %s", duration(estimate), hint)
    return {
        "weights": {key: value.clone() for key, value in trainer.network.state_dict().items()},
        "robust_fraction": trainer.engine.robust_fraction.state_dict(),
        "history": trainer.engine.history.state_dict(),
    }


def _time_methods(
    make: Callable[[str], Trainer], state: dict[str, Any], shares: Shares | None, steps: int, repeats: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Time the baseline and BulletTrain, and return their rows and notes."""
    cases = []
    for method in METHODS:
        before = _memory(peak=False)
        trainer = make(method)
        trainer.network.load_state_dict(state["weights"])
        trainer.engine.robust_fraction.load_state_dict(state["robust_fraction"])
        if trainer.engine.history.examples:
            trainer.engine.history.load_state_dict(state["history"])
        cases.append(Timed(trainer, shares, steps))
        cases[-1].memory = _memory(peak=True) - before
    for _ in range(repeats):
        for case in cases:  # in turns, so that a device that slows down affects both
            case.time()
    baseline, mined = ({"method": method, **_figures(case)} for method, case in zip(METHODS, cases, strict=True))
    figures = speedups(trainer.engine.objective, trainer.config.method, mined)  # the last trainer is BulletTrain's
    mined["theoretical_speedup"] = figures["theoretical_speedup"]
    mined["work_speedup"] = baseline["work"] / mined["work"]
    mined["wall_clock_speedup"] = baseline["step_ms"] / mined["step_ms"]
    notes = (note for case in cases for note in case.trainer.recorder.notes)
    return [baseline, mined], list(dict.fromkeys(notes))


def _figures(timed: Timed) -> dict[str, Any]:
    """Return the row of a timed trainer."""
    trainer, m, seconds = timed.trainer, timed.trainer.config.training.batch_size, timed.step_ms / 1000
    figures = trainer.figures(trainer.metrics.read(False))
    return {
        "step_ms": timed.step_ms,
        "spread_ms": timed.spread_ms,
        **phases_ms(timed),
        "epoch_seconds": timed.epoch_seconds,
        "examples_per_second": m / seconds,
        "tflops": figures["work"] * m * _forward_flops(trainer) / seconds / 1e12,
        "memory_gib": timed.memory / 2**30 if timed.device.type == "cuda" else None,
        "capture_seconds": timed.capture_seconds,
        **{name: figures[name] for name in ("work", *SHARES)},
        **dict.fromkeys(("theoretical_speedup", "work_speedup", "wall_clock_speedup")),
    }


def _memory(*, peak: bool) -> int:
    """Return the peak of GPU memory in bytes, or reset it and return the current use."""
    if not torch.cuda.is_available():
        return 0
    if peak:
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _forward_flops(trainer: Trainer) -> float:
    """Return the floating-point operations of a forward pass per example."""
    image = trainer.train_set.images[:1].to(trainer.place.device).float() / 255
    with frozen(trainer.network), torch.no_grad(), FlopCounterMode(display=False) as counter:
        trainer.network(image)
    return float(counter.get_total_flops())
