"""The runs of rows: train, evaluate, keep a record, and time what shared a device. Each goes on where it was."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from bullettrain.brief import first_line
from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError
from bullettrain.data import DataError, load
from bullettrain.evaluation.corruptions import spot_corruptions
from bullettrain.evaluation.evaluate import Plan, evaluate
from bullettrain.evaluation.progress import EvaluationProgress
from bullettrain.evaluation.results import Store
from bullettrain.evaluation.scores import score_ranks
from bullettrain.evaluation.specs import parse_attack, threat_of
from bullettrain.loading import load_model
from bullettrain.lock import end_with_parent
from bullettrain.processes import StoppedError, StopRequest, find_place
from bullettrain.reporting import write_report
from bullettrain.reproduction.records import WEIGHTS, Record, figure_of, record_of
from bullettrain.reproduction.studies import RANKS
from bullettrain.reproduction.tasks import RECORDS, RUNS, Task
from bullettrain.run_folder import RunError, RunFolder, environment
from bullettrain.training.collapse import CollapseError
from bullettrain.training.run import train
from bullettrain.training.setup import load_data
from bullettrain.training.timing import Timed
from bullettrain.training.trainer import Trainer

Found = TypeVar("Found")
SPAWN = multiprocessing.get_context("spawn")
"""A fork would copy CUDA and threads."""
STEPS, REPEATS = 40, 5
"""Mini-batches timed at once, and how often."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskResult:
    """How it went: what went wrong, or the signal that stopped it, if any."""

    name: str
    problem: str | None = None
    signal: int | None = None


def perform(task: Task, console: Console | None = None) -> TaskResult:
    """Do what is left of ``task``. ConfigError and DataError, the user's mistakes, are raised."""
    stop = StopRequest()
    try:
        # How it is computed may differ from when it was begun (another device): what is learnt does not.
        config = task.folder_config() if task.folder.exists else task.config
        kept = task.record() if task.trained else None  # figures of another training have no place beside these
        if kept is None or not kept.finished:
            _most_jobs(task)
            # A collapse is a result: it is recorded and shown.
            how: dict[str, Any] = {"resume": task.folder.exists, "keep_going": True}
            place = find_place(task.device)
            try:
                result = train(config, task.folder.path, place, data_dir=task.data_dir, console=console, **how)
            finally:
                if task.report and task.folder.exists:
                    write_report(task.folder.path)
            if result.signal is not None:
                return TaskResult(task.name, signal=result.signal)
        with stop:
            return _evaluate(task, config, kept, EvaluationProgress(console, stop))
    except StoppedError:
        return TaskResult(task.name, signal=stop.signal)
    except (CollapseError, RunError, RuntimeError) as error:
        return TaskResult(task.name, problem=first_line(error))


def _evaluate(task: Task, config: Config, kept: Record | None, progress: EvaluationProgress) -> TaskResult:
    """The attacks and measures that training did not end with, and the record."""
    device, folder = find_place(task.device).device, task.folder.path
    jobs = kept.jobs if kept is not None and kept.finished else _most_jobs(task)
    record = record_of(folder, jobs=jobs, kept=kept)
    record.write(task.out / RECORDS)  # what training alone gave is worth keeping already
    missing = task.missing(record)
    if not missing:
        return TaskResult(task.name)
    test = load_data(config, task.data_dir)[2]
    model, store = load_model(str(folder), weights=WEIGHTS, network=config.network.name), Store(folder)
    made_here = {RANKS, *(["corruptions"] if task.corruptions is None else [])}
    if attacks := [parse_attack(attack, threat_of(config)) for attack in missing if attack not in made_here]:
        cuda = device.type == "cuda"
        plan = Plan(
            attacks,
            (task.precision or "float32",),
            corruptions=task.corruptions,
            images=task.images,
            batch_size=1000 if cuda else 500,
            compiled=config.training.compile and cuda,
        )
        try:
            with store.alone(), progress:
                name = config.data.name
                entry, asked = evaluate(model, test, name, plan, device=device, store=store, progress=progress)
        except ConfigError as error:  # of this network: it has learnt NaN, for one
            return TaskResult(task.name, problem=str(error))
        record = record_of(folder, jobs=jobs, kept=record)
        if task.precision is not None:  # asked for: these, and not what is there on more images in another precision
            record.figures |= {result.name: figure_of(entry, result) for result in asked if result.name != "clean"}
    network = model.network.to(device)
    if "corruptions" in made_here & set(missing):
        record.figures["corruptions"] = spot_corruptions(network, test, device=device)
    if RANKS in missing:
        images = load(config.data.name, split="train", root=task.data_dir, image_size=config.data.image_size)
        record.measures |= {**score_ranks(network, images, config.method, device=device), "ranked": 1.0}
    record.write(task.out / RECORDS)
    return TaskResult(task.name)


def _most_jobs(task: Task) -> int:
    """The most runs that have shared the device while this one trained, also before it was stopped."""
    runs, name = RunFolder(task.out / RUNS), f".{task.name}.jobs"
    runs.path.mkdir(parents=True, exist_ok=True)
    most = max(task.jobs, int((runs.path / name).read_text()) if (runs.path / name).exists() else 1)
    runs.write(name, str(most).encode())
    return most


# ------------------------------------------------------------------------------------------- concurrently


def run_all(tasks: Sequence[Task], *, jobs: int, console: Console | None) -> list[TaskResult]:
    """Do all ``tasks``, and after a signal none that is not begun. A run that fails does not stop the others."""
    if jobs > 1:
        return _run_concurrently(tasks, jobs)
    results: list[TaskResult] = []
    for number, task in enumerate(tasks, 1):
        logger.info("%d/%d  %s  %s", number, len(tasks), task.label, task.name)
        results.append(perform(task, console))
        if results[-1].signal is not None:
            break
    return results


def _run_concurrently(tasks: Sequence[Task], jobs: int) -> list[TaskResult]:
    results, left, running = list[TaskResult](), list(tasks), dict[Future[TaskResult], Task]()
    with StopRequest() as stop:
        try:
            while (left or running) and stop.signal is None:
                while left and len(running) < jobs:
                    task = left.pop(0)
                    running[_in_process(perform, task)] = task
                for future in wait(running, timeout=0.2, return_when=FIRST_COMPLETED).done:
                    name = running.pop(future).name
                    try:
                        results.append(future.result())  # the user's mistakes are raised
                    except BrokenProcessPool:
                        problem = "stopped, since its process was killed; the same command continues it"
                        results.append(TaskResult(name, problem=problem))
                    logger.info("%d/%d  done  %s", len(results), len(tasks), name)
        finally:
            if running:  # a signal, or the user's mistake
                _stop_workers()
                wait(running)
    return results if stop.signal is None else [*results, TaskResult("", signal=stop.signal)]


def _in_process(function: Callable[..., Found], *arguments: object) -> Future[Found]:
    """Call ``function`` in a process of its own."""
    pool = ProcessPoolExecutor(1, SPAWN, _start_worker)
    future = pool.submit(function, *arguments)
    pool.shutdown(wait=False)  # it ends with this call
    return future


def _stop_workers() -> None:
    """A run finishes its step and saves."""
    for worker in multiprocessing.active_children():
        worker.terminate()


def _start_worker() -> None:
    """Ctrl-C reaches the first process alone, which hands it on once, as SIGTERM."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    end_with_parent()


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
        record.timing = _in_process(_time, record, data_dir, device).result()
    except KeyboardInterrupt:
        _stop_workers()
        raise
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
        **{"steps": STEPS, "repeats": REPEATS, "notes": trainer.recorder.notes},
        "environment": environment(place.device),
    }
