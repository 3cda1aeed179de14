"""Run tasks: train, evaluate, write the record, and time steps. Interrupted tasks resume."""

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
from typing import Any

import torch
from rich.console import Console

from bullettrain.brief import first_line
from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError
from bullettrain.data import DataError, load
from bullettrain.errors import raised_as
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
from bullettrain.run_folder import SHARES, RunError, RunFolder, environment
from bullettrain.training.collapse import CollapseError
from bullettrain.training.run import train
from bullettrain.training.setup import load_data
from bullettrain.training.timing import Timed
from bullettrain.training.trainer import Trainer

TIMED_STEPS, TIMINGS = 40, 5
"""Batches in each timing, and number of timings."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskResult:
    """The result of a task: a problem, or the signal that stopped it, if any."""

    name: str
    problem: str | None = None
    signal: int | None = None


def perform(task: Task, console: Console | None = None) -> TaskResult:
    """Do what is missing of ``task``.

    Raises:
        ConfigError, DataError: the user made a mistake.
    """
    stop = StopRequest()
    try:
        config = task.folder_config() if task.folder.exists else task.config
        kept = task.record() if task.trained else None  # an older record may be of another training
        if kept is None or not kept.finished:
            _most_jobs(task)
            options: dict[str, Any] = {"data_dir": task.data_dir, "resume": task.folder.exists, "console": console}
            try:  # a collapse is a result, too: keep going
                result = train(config, task.folder.path, find_place(task.device), keep_going=True, **options)
            finally:
                if task.report and task.folder.exists:
                    write_report(task.folder.path)
            if result.signal is not None:
                return TaskResult(task.name, signal=result.signal)
        with stop:
            _evaluate(task, config, kept, EvaluationProgress(console, stop))
        return TaskResult(task.name)
    except StoppedError:
        return TaskResult(task.name, signal=stop.signal)
    except (CollapseError, RunError, RuntimeError) as error:
        return TaskResult(task.name, problem=first_line(error))


def _evaluate(task: Task, config: Config, kept: Record | None, progress: EvaluationProgress) -> None:
    """Run the attacks and measurements that are missing, and write the record."""
    device, folder = find_place(task.device).device, task.folder.path
    jobs = kept.jobs if kept is not None and kept.finished else _most_jobs(task)
    record = record_of(folder, jobs=jobs, kept=kept)
    record.write(task.out / RECORDS)  # in case the evaluation is interrupted
    if not (missing := task.missing(record)):
        return
    test = load_data(config, task.data_dir)[2]
    model, store = load_model(str(folder), weights=WEIGHTS, network=config.network.name), Store(folder)
    made_here = {RANKS, *(["corruptions"] if task.corruptions is None else [])}
    if attacks := [parse_attack(attack, threat_of(config)) for attack in missing if attack not in made_here]:
        cuda, data = device.type == "cuda", config.data.name
        plan = Plan(
            attacks,
            (task.precision or "float32",),
            corruptions=task.corruptions,
            images=task.images,
            batch_size=1000 if cuda else 500,
            compiled=config.training.compile and cuda,
        )
        with raised_as(RunError, "{error}", ConfigError), store.locked(), progress:  # e.g. the network returns NaN
            entry, results = evaluate(model, test, data, plan, device=device, store=store, progress=progress)
        record = record_of(folder, jobs=jobs, kept=record)
        if task.precision is not None:  # replace results on more images, but in another precision
            record.figures |= {result.name: figure_of(entry, result) for result in results if result.name != "clean"}
    network = model.network.to(device)
    if "corruptions" in made_here & set(missing):
        record.figures["corruptions"] = spot_corruptions(network, test, device=device)
    if RANKS in missing:
        images = load(config.data.name, split="train", root=task.data_dir, image_size=config.data.image_size)
        record.measures |= {**score_ranks(network, images, config.method, device=device), "ranked": 1.0}
    record.write(task.out / RECORDS)


def _most_jobs(task: Task) -> int:
    """Return the largest number of concurrent runs during training, also before an interruption."""
    runs, name = RunFolder(task.out / RUNS), f".{task.name}.jobs"
    runs.path.mkdir(parents=True, exist_ok=True)
    most = max(task.jobs, int((runs.path / name).read_text()) if (runs.path / name).exists() else 1)
    runs.write(name, str(most).encode())
    return most


# ------------------------------------------------------------------------------------------- concurrently


def run_all(tasks: Sequence[Task], *, jobs: int, console: Console | None) -> list[TaskResult]:
    """Perform ``tasks`` until a signal. A task that fails does not stop the others."""
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
    results, waiting, running = list[TaskResult](), list(tasks), dict[Future[Any], Task]()
    with StopRequest() as stop:
        try:
            while (waiting or running) and stop.signal is None:
                while waiting and len(running) < jobs:
                    task = waiting.pop(0)
                    running[_in_process(perform, task)] = task
                for future in wait(running, timeout=0.2, return_when=FIRST_COMPLETED).done:
                    name = running.pop(future).name
                    try:
                        results.append(future.result())
                    except BrokenProcessPool:
                        problem = "stopped, since its process was killed; the same command continues it"
                        results.append(TaskResult(name, problem=problem))
                    logger.info("%d/%d  done  %s", len(results), len(tasks), name)
        finally:
            if running:  # after a signal or an error
                _stop_workers()
                wait(running)
    return results if stop.signal is None else [*results, TaskResult("", signal=stop.signal)]


def _in_process(function: Callable[..., Any], *arguments: object) -> Future[Any]:
    """Call ``function`` in a process of its own. A fork would copy CUDA and threads."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start_worker)
    future = pool.submit(function, *arguments)
    pool.shutdown(wait=False)  # the process ends after this call
    return future


def _stop_workers() -> None:
    """Terminate the worker processes. A run finishes its step and saves a checkpoint."""
    for worker in multiprocessing.active_children():
        worker.terminate()


def _start_worker() -> None:
    """Ignore Ctrl-C, which the main process forwards once, as SIGTERM."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    end_with_parent()


# ------------------------------------------------------------------------------------------------ timing


def is_timed(record: Record, device: torch.device) -> bool:
    """Return whether ``record`` has a timing of this commit on this device. Uncommitted changes count as untimed."""
    old, new = record.timing.get("environment", {}), environment(device)
    committed = bool(new["commit"]) and not new["commit"].endswith("-dirty")
    return committed and all(old.get(key) == new[key] for key in ("device", "torch", "commit"))


def time_run(record: Record, folder: Path, data_dir: Path | None = None, device: str | None = None) -> TaskResult:
    """Time steps at the average shares of the run, and write the timing to ``record`` and its file in ``folder``."""
    if record.mined and record.config["method"]["separation"] != "quantile":
        return TaskResult(record.name, problem="its categories come from an oracle and cannot be imposed; run it alone")
    try:
        record.timing = _in_process(_time, record, data_dir, device).result()
    except KeyboardInterrupt:
        _stop_workers()
        raise
    except (DataError, RuntimeError, ValueError) as error:  # including ConfigError and a killed process
        return TaskResult(record.name, problem=first_line(error))
    record.write(folder)
    logger.info("%8.2f s an epoch  %s", record.timing["epoch_seconds"], record.name)
    return TaskResult(record.name)


def _time(record: Record, data_dir: Path | None, device: str | None) -> dict[str, Any]:
    """Time the steps of a run. Initial weights will do, since speed does not depend on them."""
    # Benchmark cuDNN at once, as it would be after a while.
    config = Config.from_dict(record.config).replace_section("training", cudnn_benchmark_after=0.0)
    place, data = find_place(device), load_data(config, data_dir)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, RunFolder(Path(folder)), place, data)
        outlier, boundary, robust = (record.shares[name] for name in SHARES)
        timed = Timed(trainer, (outlier, boundary, robust) if record.mined else None, TIMED_STEPS)
        for _ in range(TIMINGS):
            timed.time()
    times = {key: getattr(timed, key) for key in ("epoch_seconds", "step_ms", "spread_ms")}
    about = {"notes": trainer.recorder.notes, "environment": environment(place.device)}
    return {**times, "steps": TIMED_STEPS, "repeats": TIMINGS, **about}
