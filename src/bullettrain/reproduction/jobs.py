"""Several runs, one after another or concurrently on one device, and how long each takes with that to itself."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bullettrain.brief import first_line
from bullettrain.config.sections import Config
from bullettrain.data import DataError
from bullettrain.lock import end_with_parent
from bullettrain.processes import StopRequest, find_place
from bullettrain.reproduction.records import Record
from bullettrain.reproduction.tasks import Task, TaskResult, perform
from bullettrain.run_folder import RunFolder, environment
from bullettrain.training.bench import Timed
from bullettrain.training.setup import load_data
from bullettrain.training.trainer import Trainer

SPAWN = multiprocessing.get_context("spawn")
"""A fork would copy CUDA and threads."""
STEPS, REPEATS = 40, 5
"""Mini-batches timed at once, and how often."""
logger = logging.getLogger(__name__)


def run_all(tasks: Sequence[Task], *, jobs: int, console: Console | None) -> list[TaskResult]:
    """Do all ``tasks``, and after a signal none that is not begun. A run that fails does not stop the others."""
    if jobs > 1:
        return _run_pool(tasks, jobs)
    results: list[TaskResult] = []
    for number, task in enumerate(tasks, 1):
        logger.info("%d/%d  %s  %s", number, len(tasks), task.label, task.name)
        results.append(perform(task, console))
        if results[-1].signal is not None:
            break
    return results


def _run_pool(tasks: Sequence[Task], jobs: int) -> list[TaskResult]:
    results: list[TaskResult] = []
    with StopRequest() as stop, ProcessPoolExecutor(jobs, SPAWN, _start_worker) as pool:
        left = list(tasks)
        running: dict[Future[TaskResult], Task] = {}
        try:
            while (left or running) and stop.signal is None:
                while left and len(running) < jobs:  # no more than can run: what is handed over cannot be taken back
                    task = left.pop(0)
                    running[pool.submit(_work, task)] = task
                for future in wait(running, timeout=0.2, return_when=FIRST_COMPLETED).done:
                    results.append(_result(future, running.pop(future)))
                    logger.info("%d/%d  done  %s", len(results), len(tasks), results[-1].name)
        finally:
            for worker in multiprocessing.active_children() if running else ():  # a signal, or the user's mistake
                worker.terminate()  # a run finishes its step and saves
    return results if stop.signal is None else [*results, TaskResult("", signal=stop.signal)]


def _result(future: Future[TaskResult], task: Task) -> TaskResult:
    """How a run went; the user's mistakes are raised."""
    try:
        return future.result()
    except BrokenProcessPool:
        return TaskResult(task.name, problem="stopped, since a process was killed; the same command continues it")


def _start_worker() -> None:
    """Ctrl-C reaches the first process alone, which hands it on once, as SIGTERM; idle workers ignore that."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()


def _work(task: Task) -> TaskResult:
    """A run in a worker: a signal that comes while there is nothing to save ends it at once."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return perform(task)
    except KeyboardInterrupt:
        return TaskResult(task.name, signal=signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


# ------------------------------------------------------------------------------------------------ timing


def is_timed(record: Record, device: torch.device) -> bool:
    """Whether ``record`` has a timing by this code on this kind of device; of uncommitted code that is not known."""
    there, here = record.timing.get("environment", {}), environment(device)
    known = bool(here["commit"]) and not here["commit"].endswith("-dirty")
    return known and all(there.get(key) == here[key] for key in ("device", "torch", "commit"))


def time_run(record: Record, folder: Path, data_dir: Path | None = None, device: str | None = None) -> TaskResult:
    """Put its timing, at the shares that the run had on average, into ``record`` and its file in ``folder``."""
    if record.mined and record.config["method"]["separation"] != "quantile":
        return TaskResult(record.name, problem="its classes are not by the rule, and cannot be imposed; run it alone")
    try:
        with ProcessPoolExecutor(1, SPAWN) as pool:
            record.timing = pool.submit(_time, record, data_dir, device).result()
    except (DataError, RuntimeError, ValueError) as error:  # ConfigError and a killed process are of these
        return TaskResult(record.name, problem=first_line(error))
    record.write(folder)
    logger.info("%8.2f s an epoch  %s", record.timing["epoch_seconds"], record.name)
    return TaskResult(record.name)


def _time(record: Record, data_dir: Path | None, device: str | None) -> dict[str, Any]:
    """In a process of its own. Weights are as they are drawn: what was learnt does not change how fast it is."""
    # Tuned at once: what a long training comes to is what is timed.
    config = Config.from_dict(record.config).replace_section("training", cudnn_benchmark_after=0.0)
    place, data = find_place(device), load_data(config, data_dir)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, RunFolder(Path(folder)), place, data)
        shares = (record.shares["outlier"], record.shares["boundary"], record.shares["robust"])
        timed = Timed(trainer, shares if record.mined else None, STEPS)
        for _ in range(REPEATS):
            timed.time()
    return {
        **{"epoch_seconds": timed.epoch_seconds, "step_ms": timed.step_ms, "spread_ms": timed.spread_ms},
        **{
            "steps": STEPS,
            "repeats": REPEATS,
            "notes": trainer.recorder.notes,
            "environment": environment(place.device),
        },
    }
