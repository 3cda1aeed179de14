"""One run of a row: train it, evaluate it, keep its record; each of these goes on where it was stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bullettrain.brief import first_line
from bullettrain.data import load
from bullettrain.evaluation.evaluate import Plan, evaluate
from bullettrain.evaluation.results import Store
from bullettrain.evaluation.specs import Defaults, parse_attack, threat_of
from bullettrain.evaluation.subject import find_subject
from bullettrain.evaluation.watch import Watch
from bullettrain.loading import load as load_network
from bullettrain.precision import Precision
from bullettrain.reproduction.measures import score_ranks, spot_corruptions
from bullettrain.reproduction.records import WEIGHTS, Figure, Record, figure_of, read_record, record_of, run_name
from bullettrain.training.collapse import CollapseError
from bullettrain.training.config import Config
from bullettrain.training.folder import RunError, RunFolder
from bullettrain.training.run import train
from bullettrain.training.settings import ConfigError
from bullettrain.training.setup import find_place, load_data
from bullettrain.training.signals import StoppedError, StopRequest

RECORDS, RUNS = "records", "runs"
SAME = " = "
"""Between the names of rows that are the same run."""
DONE, ON_RECORD, RANKS = "done", "on record", "the score's ranks"


@dataclass(frozen=True)
class Task:
    """A run to be had: what is trained, and all that is wanted of it.

    Args:
        out: folder of the reproduction; the run has a folder in its ``runs``.
        attacks: as `--attack` takes them; none: it is trained, and evaluated some other time.
        ranks: whether its score is compared with the oracle's classes.
        precision: that attacks after training search in. None: what is there will do, and float32 for the rest.
        corruptions: folder of CIFAR-C's files; without one, corruptions are made on the spot.
        jobs: runs that share the device.
        label: the rows that it is of, for a person.
    """

    config: Config
    out: Path
    attacks: tuple[str, ...]
    ranks: bool = False
    size: int = 0
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
    def folder(self) -> Path:
        """Of the run."""
        return self.out / RUNS / self.name

    def record(self) -> Record | None:
        """What is kept of it so far."""
        return read_record(self.out / RECORDS / f"{self.name}.json")

    def missing(self, record: Record) -> list[str]:
        """What is wanted and not in ``record``: on enough images, and in float32 where that is asked for."""
        figures = record.figures
        whole = figures.get("clean", {}).get("examples", 0)
        enough = min(self.size, whole) if self.size else whole

        def there(name: str) -> bool:
            if name not in figures or (self.precision == "float32" and "precision" in figures[name]):
                return False
            return name == "corruptions" or bool(figures[name]["examples"] >= enough)  # which have a size of their own

        ranks = [RANKS] if self.ranks and "ranked" not in record.measures else []
        return [attack for attack in self.attacks if not there(attack_name(attack))] + ranks

    def state(self) -> str:
        """How far it is: "done"; "on record", where its run is not here and the record lacks something that only
        training anew could give (a record is worth more than that); trained, in some epoch, or new."""
        record, folder = self.record(), RunFolder(self.folder)
        if record is not None and record.finished:
            if not self.missing(record):
                return DONE
            if not folder.exists:
                return ON_RECORD
        epochs, planned = self.epochs_done(), self.config.training.epochs
        return "trained" if epochs == planned else f"epoch {epochs} of {planned}" if epochs else "new"

    def epochs_done(self) -> int:
        """Epochs that are trained already, and can be continued from."""
        records = RunFolder(self.folder).records()
        return max((int(one["epoch"]) for one in records if one.get("kind") == "epoch"), default=0)


@dataclass(frozen=True)
class TaskResult:
    """How it went: what went wrong, or the signal that stopped it, if any."""

    name: str
    problem: str | None = None
    signal: int | None = None


def attack_name(attack: str) -> str:
    """The name under which results of an attack, written as `--attack` takes it, are kept."""
    return attack if attack == RANKS else parse_attack(attack, Defaults()).name


def perform(task: Task, console: Console | None = None) -> TaskResult:
    """Do what is left of ``task``. ConfigError and DataError, the user's mistakes, are raised."""
    folder = RunFolder(task.folder)
    try:
        # How it is computed may differ from when it was begun (another device): what is learnt does not.
        config = folder.config() if folder.exists else task.config
        kept = task.record() if folder.exists and folder.finished else None  # else it is of another training
        if kept is None or not kept.finished:
            _most_jobs(task)
            result = train(
                config,
                task.folder,
                find_place(task.device),
                data_dir=task.data_dir,
                resume=folder.exists,
                keep_going=True,  # a collapse is a result: it is recorded and shown
                report=task.report,
                console=console,
            )
            if result.signal is not None:
                return TaskResult(task.name, signal=result.signal)
        with StopRequest() as stop:
            try:
                _evaluate(task, config, console, stop, kept)
            except StoppedError:
                return TaskResult(task.name, signal=stop.signal)
            except ConfigError as error:  # of this network: it has learnt NaN, for one
                return TaskResult(task.name, problem=str(error))
    except (CollapseError, RunError, RuntimeError) as error:
        return TaskResult(task.name, problem=first_line(error))
    return TaskResult(task.name)


def _evaluate(task: Task, config: Config, console: Console | None, stop: StopRequest, kept: Record | None) -> None:
    """The attacks and measures that training did not end with, and the record."""
    device = find_place(task.device).device
    record = _renewed(task, kept)
    record.write(task.out / RECORDS)  # what training alone gave is worth keeping already
    missing = task.missing(record)
    if not missing:
        return
    spot = task.corruptions is None and "corruptions" in missing
    attacks = [attack for attack in missing if attack != RANKS and not (spot and attack == "corruptions")]
    test = load_data(config, task.data_dir)[2]
    figures: dict[str, Figure] = {}
    if attacks:
        plan = Plan(
            [parse_attack(attack, threat_of(config)) for attack in attacks],
            (task.precision or "float32",),
            batch_size=1000 if device.type == "cuda" else 500,
            compiled=config.training.compile and device.type == "cuda",
            corruptions=task.corruptions,
            size=task.size,
        )
        subject, store = find_subject(str(task.folder), weights=WEIGHTS), Store(task.folder)
        with store.alone(), Watch(console, stop) as watch:
            entry, asked = evaluate(subject, test, config.data.name, plan, device=device, store=store, watch=watch)
        if task.precision is not None:  # asked for: these, and not what is there on more images in another precision
            figures |= {result.name: figure_of(entry, result) for result in asked if result.name != "clean"}
    measures: dict[str, Any] = {}
    network = load_network(task.folder, weights=WEIGHTS, trust=True).to(device)
    if spot:
        figures["corruptions"] = spot_corruptions(network, test, device=device)
    if RANKS in missing:
        images = load(config.data.name, split="train", root=task.data_dir, image_size=config.data.image_size)
        measures = {**score_ranks(network, images, config.method, device=device), "ranked": 1.0}
    final = record_of(task.folder, jobs=record.jobs, kept=record)
    final.figures |= figures
    final.measures |= measures
    final.write(task.out / RECORDS)


def renew(task: Task) -> TaskResult:
    """Put what `bullettrain evaluate` has found since into the record of a finished run, where that is here."""
    kept, folder = task.record(), RunFolder(task.folder)
    try:
        if kept is not None and kept.finished and folder.exists and folder.finished:
            _renewed(task, kept).write(task.out / RECORDS)
    except RunError as error:
        return TaskResult(task.name, problem=str(error))
    return TaskResult(task.name)


def _renewed(task: Task, kept: Record | None) -> Record:
    jobs = kept.jobs if kept is not None and kept.finished else _most_jobs(task)
    return record_of(task.folder, jobs=jobs, kept=kept)


def _most_jobs(task: Task) -> int:
    """The most runs that have shared the device while this one trained, also before it was stopped."""
    runs = RunFolder(task.out / RUNS)
    runs.path.mkdir(parents=True, exist_ok=True)
    file = runs.path / f".{task.name}.jobs"
    most = max(task.jobs, int(file.read_text()) if file.exists() else 1)
    runs.write(file.name, str(most).encode())
    return most


def seconds_left(task: Task, records: Mapping[str, Record], device: str) -> tuple[float, str] | None:
    """Training that is left, by the time of the same run with any seed, and the device that this was measured on: this
    one if it was, else another; None where it was not measured."""
    stem = task.name.rpartition("-s")[0]
    timed = [(record, record.alone) for record in records.values() if record.name.rpartition("-s")[0] == stem]
    timed.sort(key=lambda pair: pair[0].timed_in.get("device") != device)
    for record, seconds in timed:
        if seconds is not None:
            left = task.config.training.epochs - task.epochs_done()
            return left * seconds / record.epochs, str(record.timed_in.get("device"))
    return None


def merged(tasks: list[Task]) -> list[Task]:
    """One task a run: rows that are the same run share it, and what is wanted of any of them is wanted of it."""
    found: dict[str, Task] = {}
    for task in tasks:
        first = found.setdefault(task.name, task)
        attacks = tuple(dict.fromkeys((*first.attacks, *task.attacks)))
        label = SAME.join(dict.fromkeys([*first.label.split(SAME), task.label]))
        found[task.name] = dataclasses.replace(first, attacks=attacks, ranks=first.ranks or task.ranks, label=label)
    return list(found.values())
