"""The runs of rows: train, evaluate, keep a record; alone or concurrently, and timed with the device to themselves.

Each goes on where it was stopped.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
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
from bullettrain.evaluation.specs import Defaults, parse_attack, threat_of
from bullettrain.loading import load as load_network
from bullettrain.loading import load_model
from bullettrain.lock import end_with_parent
from bullettrain.precision import Precision
from bullettrain.processes import StoppedError, StopRequest, find_place
from bullettrain.reporting import write_report
from bullettrain.reproduction.records import WEIGHTS, Record, figure_of, read_record, record_of, run_name
from bullettrain.reproduction.studies import RANKS
from bullettrain.run_folder import RunError, RunFolder, environment
from bullettrain.training.collapse import CollapseError
from bullettrain.training.run import train
from bullettrain.training.setup import load_data
from bullettrain.training.timing import Timed
from bullettrain.training.trainer import Trainer

Found = TypeVar("Found")
RECORDS, RUNS = "records", "runs"
SAME = " = "
"""Between the names of rows that are the same run."""
DONE, ON_RECORD = "done", "on record"
SPAWN = multiprocessing.get_context("spawn")
"""A fork would copy CUDA and threads."""
STEPS, REPEATS = 40, 5
"""Mini-batches timed at once, and how often."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A run to be had: what is trained, and all that is wanted of it.

    Args:
        out: folder of the reproduction; the run has a folder in its ``runs``.
        attacks: as `--attack` takes them, and ``ranks``: how its score orders examples, beside the oracle's classes.
            None: it is trained, and evaluated some other time.
        images: test images for attacks that training does not end with; 0: all.
        precision: that attacks after training search in. None: what is there will do, and float32 for the rest.
        corruptions: folder of CIFAR-C's files; without one, corruptions are made on the spot.
        jobs: runs that share the device.
        label: the rows that it is of, for a person.
    """

    config: Config
    out: Path
    attacks: tuple[str, ...]
    images: int = 0
    precision: Precision | None = None
    corruptions: Path | None = None
    data_dir: Path | None = None
    device: str | None = None
    report: bool = True
    jobs: int = 1
    label: str = ""

    @property
    def name(self) -> str:
        """Of the run, its folder and its record."""
        return run_name(self.config)

    @property
    def folder(self) -> RunFolder:
        """Of the run."""
        return RunFolder(self.out / RUNS / self.name)

    @property
    def trained(self) -> bool:
        """Whether its training, here, came to its end."""
        return self.folder.exists and self.folder.finished

    def record(self) -> Record | None:
        """What is kept of it so far."""
        file = self.out / RECORDS / f"{self.name}.json"
        if (record := read_record(file)) is None:
            return None
        network = record.config.get("network")
        return self._of_this_network(record, network.get("name") if isinstance(network, dict) else network, file)

    def folder_config(self) -> Config:
        """The configuration of the run in its folder; how it is computed may differ from what is asked for now."""
        config = self.folder.config()
        return self._of_this_network(config, config.network.name, self.folder.path / "config.yaml")

    def _of_this_network(self, found: Found, name: object, file: Path) -> Found:
        """``found``; RunError where its file names another network, which may be any function, than this task."""
        if name != self.config.network.name:
            raise RunError(f"{file} is of the network {name!r}, not of {self.config.network.name!r}; move it away")
        return found

    def missing(self, record: Record) -> list[str]:
        """What is wanted and not in ``record``: on enough images, and in float32 where that is asked for."""
        figures = record.figures
        whole = figures.get("clean", {}).get("examples", 0)
        enough = min(self.images, whole) if self.images else whole

        def there(name: str) -> bool:
            if name == RANKS:
                return "ranked" in record.measures
            if name not in figures or (self.precision == "float32" and "precision" in figures[name]):
                return False
            return name == "corruptions" or bool(figures[name]["examples"] >= enough)  # which have a size of their own

        return [attack for attack in self.attacks if not there(attack_name(attack))]

    def state(self) -> str:
        """How far it is: "done"; "on record", where its run is not here and the record lacks something that only
        training anew could give (a record is worth more than that); trained, in some epoch, or new."""
        record = self.record()
        if record is not None and record.finished and not self.missing(record):
            return DONE
        if record is not None and record.finished and not self.folder.exists:
            return ON_RECORD
        epochs, planned = self.epochs_done(), self.config.training.epochs
        return "trained" if epochs == planned else f"epoch {epochs} of {planned}" if epochs else "new"

    def epochs_done(self) -> int:
        """Epochs that are trained already, and can be continued from."""
        records = self.folder.records()
        return max((int(one["epoch"]) for one in records if one.get("kind") == "epoch"), default=0)

    def seconds_left(self, records: Mapping[str, Record], device: str) -> tuple[float, str] | None:
        """Training that is left, by the time of the same run with any seed, and the device that this was measured on:
        ``device`` if it was, else another; None where it was not measured."""
        runs = [run for run in records.values() if run.alone and run.stem == self.name.rpartition("-s")[0]]
        run = min(runs, key=lambda run: run.timed_in.get("device") != device, default=None)
        if run is None or run.alone is None:
            return None
        left = self.config.training.epochs - self.epochs_done()
        return left * run.alone / run.epochs, str(run.timed_in.get("device"))


@dataclass(frozen=True)
class TaskResult:
    """How it went: what went wrong, or the signal that stopped it, if any."""

    name: str
    problem: str | None = None
    signal: int | None = None


def attack_name(attack: str) -> str:
    """The name under which results of an attack, written as `--attack` takes it, are kept."""
    return attack if attack == RANKS else parse_attack(attack, Defaults()).name


def merged(tasks: list[Task]) -> list[Task]:
    """One task a run: rows that are the same run share it, and what is wanted of any of them is wanted of it."""
    found: dict[str, Task] = {}
    for task in tasks:
        first = found.setdefault(task.name, task)
        attacks = tuple(dict.fromkeys((*first.attacks, *task.attacks)))
        images = max(first.images, task.images) if first.images and task.images else 0  # 0: all
        label = SAME.join(dict.fromkeys([*first.label.split(SAME), task.label]))
        found[task.name] = dataclasses.replace(first, attacks=attacks, images=images, label=label)
    return list(found.values())


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
    spot = task.corruptions is None and "corruptions" in missing
    attacks = [attack for attack in missing if attack != RANKS and not (spot and attack == "corruptions")]
    test = load_data(config, task.data_dir)[2]
    if attacks:
        cuda, parsed = device.type == "cuda", [parse_attack(attack, threat_of(config)) for attack in attacks]
        how: dict[str, Any] = {"batch_size": 1000 if cuda else 500, "compiled": config.training.compile and cuda}
        plan = Plan(parsed, (task.precision or "float32",), corruptions=task.corruptions, images=task.images, **how)
        model, store = load_model(str(folder), weights=WEIGHTS, network=config.network.name), Store(folder)
        try:
            with store.alone(), progress:
                name = config.data.name
                entry, asked = evaluate(model, test, name, plan, device=device, store=store, progress=progress)
        except ConfigError as error:  # of this network: it has learnt NaN, for one
            return TaskResult(task.name, problem=str(error))
        record = record_of(folder, jobs=jobs, kept=record)
        if task.precision is not None:  # asked for: these, and not what is there on more images in another precision
            record.figures |= {result.name: figure_of(entry, result) for result in asked if result.name != "clean"}
    if spot or RANKS in missing:
        network = load_network(folder, weights=WEIGHTS, network=config.network.name).to(device)
    if spot:
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
        return _run_pool(tasks, jobs)
    results: list[TaskResult] = []
    for number, task in enumerate(tasks, 1):
        logger.info("%d/%d  %s  %s", number, len(tasks), task.label, task.name)
        results.append(perform(task, console))
        if results[-1].signal is not None:
            break
    return results


def _run_pool(tasks: Sequence[Task], jobs: int) -> list[TaskResult]:
    results, left, running = list[TaskResult](), list(tasks), dict[Future[TaskResult], Task]()
    with StopRequest() as stop, ProcessPoolExecutor(jobs, SPAWN, _start_worker) as pool:
        try:
            while (left or running) and stop.signal is None:
                while left and len(running) < jobs:  # no more than can run: what is handed over cannot be taken back
                    task = left.pop(0)
                    running[pool.submit(_work, task)] = task
                for future in wait(running, timeout=0.2, return_when=FIRST_COMPLETED).done:
                    task = running.pop(future)
                    try:
                        results.append(future.result())  # the user's mistakes are raised
                    except BrokenProcessPool:
                        problem = "stopped, since a process was killed; the same command continues it"
                        results.append(TaskResult(task.name, problem=problem))
                    logger.info("%d/%d  done  %s", len(results), len(tasks), task.name)
        finally:
            for worker in multiprocessing.active_children() if running else ():  # a signal, or the user's mistake
                worker.terminate()  # a run finishes its step and saves
    return results if stop.signal is None else [*results, TaskResult("", signal=stop.signal)]


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
        **{"steps": STEPS, "repeats": REPEATS, "notes": trainer.recorder.notes},
        "environment": environment(place.device),
    }
