"""One run of a row: train it, judge it, keep its record; each of these goes on where it was stopped."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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
from bullettrain.reproduction.records import WEIGHTS, Record, better, figure_of, read_record, record_of, run_name
from bullettrain.training.collapse import CollapseError
from bullettrain.training.config import Config
from bullettrain.training.folder import RunError, RunFolder
from bullettrain.training.run import train
from bullettrain.training.settings import ConfigError
from bullettrain.training.setup import find_place, load_data
from bullettrain.training.signals import StoppedError, StopRequest

Found = TypeVar("Found")
RECORDS, RUNS = "records", "runs"
SAME = " = "
"""Between the names of rows that are the same run."""
FOLDERS = {"cifar10": "CIFAR-10-C", "cifar100": "CIFAR-100-C"}
"""Where corruptions of a dataset are looked for, beside it."""


@dataclass(frozen=True)
class Task:
    """A run to be had: what is trained, and all that is wanted of it."""

    config: Config
    out: Path
    """Of the reproduction; the run has a folder in its ``runs``."""
    attacks: tuple[str, ...]
    """As `--attack` takes them; none: it is trained, and judged some other time."""
    ranks: bool = False
    size: int = 0
    precision: Precision | None = None
    """That attacks after training search in. None: what is there will do, and float32 for the rest."""
    corruptions: Path | None = None
    """Folder of CIFAR-C's files; without one, corruptions are made on the spot."""
    data_dir: Path | None = None
    device: str | None = None
    report: bool = True
    jobs: int = 1
    label: str = ""
    """The rows that it is of, for a person."""

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
        file = self.out / RECORDS / f"{self.name}.json"
        if (record := read_record(file)) is None:
            return None
        network = record.config.get("network")
        return self._of_this_network(record, network.get("name") if isinstance(network, dict) else network, file)

    def folder_config(self) -> Config:
        """The configuration of the run in its folder; how it is computed may differ from what is asked for now."""
        config = RunFolder(self.folder).config()
        return self._of_this_network(config, config.network.name, self.folder / "config.yaml")

    def _of_this_network(self, found: Found, name: object, file: Path) -> Found:
        """``found``; RunError where its file names another network, which may be any function, than this task."""
        if name != self.config.network.name:
            raise RunError(f"{file} is of the network {name!r}, not of {self.config.network.name!r}; move it away")
        return found

    def missing(self, record: Record | None) -> list[str]:
        """Attacks that are wanted and not in ``record`` on enough images, in float32 where that is asked for."""
        figures = record.figures if record is not None else {}
        whole = figures.get("clean", {}).get("examples", 0)
        enough = min(self.size, whole) if self.size else whole

        def there(name: str) -> bool:
            if name not in figures or (self.precision == "float32" and "precision" in figures[name]):
                return False  # a folder of corruptions has a size of its own
            return name == "corruptions" or bool(figures[name]["examples"] >= enough)

        return [attack for attack in self.attacks if not there(attack_name(attack))]

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        record = self.record()
        if record is None or not record.finished or self.missing(record):
            return False
        return not self.ranks or "ranked" in record.measures

    @property
    def without_weights(self) -> bool:
        """Whether it is on record and its run is not here: what the record lacks could be had by training anew alone.

        A record is worth more than that: it may be of another device, and have figures that take hours.
        """
        record = self.record()
        return record is not None and record.finished and not RunFolder(self.folder).exists

    @property
    def is_left(self) -> bool:
        """Whether it is to be trained or judged."""
        return not self.done and not self.without_weights

    @property
    def epochs_done(self) -> int:
        """Epochs that are trained already, and can be gone on from."""
        records = RunFolder(self.folder).records()
        return max((int(r["epoch"]) for r in records if r.get("kind") == "epoch"), default=0)


@dataclass(frozen=True)
class Outcome:
    """How it went."""

    name: str
    problem: str | None = None
    signal: int | None = None
    """That stopped it."""


def attack_name(attack: str) -> str:
    """The name under which results of an attack, written as `--attack` takes it, are kept."""
    return parse_attack(attack, Defaults()).name


def perform(task: Task, console: Console | None = None) -> Outcome:
    """Do what is left of ``task``. ConfigError and DataError, the user's mistakes, are raised."""
    if task.done:
        return Outcome(task.name)
    place = find_place(task.device)
    folder = RunFolder(task.folder)
    try:
        # How it is computed may differ from when it was begun (another device): what is learnt does not.
        config = task.folder_config() if folder.exists else task.config
        kept = task.record() if _is_trained(folder) else None  # figures of another training have no place beside these
        if kept is None or not kept.finished:
            _most_jobs(task)
            result = train(
                config,
                task.folder,
                place,
                data_dir=task.data_dir,
                resume=folder.exists,
                keep_going=True,  # a collapse is a result: it is recorded and shown
                report=task.report,
                console=console,
            )
            if result.signal is not None:
                return Outcome(task.name, signal=result.signal)
        with StopRequest() as stop:
            try:
                _judge(task, config, console, stop, kept)
            except StoppedError:
                return Outcome(task.name, signal=stop.signal)
            except ConfigError as error:  # of this network: it has learnt NaN, for one
                return Outcome(task.name, problem=str(error))
    except (CollapseError, RunError, RuntimeError) as error:
        return Outcome(task.name, problem=first_line(error))
    return Outcome(task.name)


def _judge(task: Task, config: Config, console: Console | None, stop: StopRequest, kept: Record | None) -> None:
    """The attacks and measures that training did not end with, and the record."""
    device = find_place(task.device).device
    record = _so_far(task, kept)
    record.write(task.out / RECORDS)  # what training alone gave is worth keeping already
    missing = task.missing(record)
    if not missing and not task.ranks:
        return
    spot = task.corruptions is None and "corruptions" in missing
    attacks = [attack for attack in missing if not (spot and attack == "corruptions")]
    test = load_data(config, task.data_dir)[2] if missing else None
    figures: dict[str, dict[str, Any]] = {}
    if attacks:
        assert test is not None
        plan = Plan(
            [parse_attack(attack, threat_of(config)) for attack in attacks],
            (task.precision or "float32",),
            batch_size=1000 if device.type == "cuda" else 500,
            compiled=config.training.compile and device.type == "cuda",
            corruptions=task.corruptions,
            size=task.size,
        )
        subject = find_subject(str(task.folder), weights=WEIGHTS, network=config.network.name)
        store = Store(task.folder)
        with store.alone(), Watch(console, stop) as watch:
            entry, asked = evaluate(subject, test, config.data.name, plan, device=device, store=store, watch=watch)
        if task.precision is not None:  # asked for: these, and not what is there on more images in another precision
            figures |= {result.name: figure_of(entry, result) for result in asked if result.name != "clean"}
    network = load_network(task.folder, weights=WEIGHTS, network=config.network.name).to(device)
    if spot:
        assert test is not None
        figures["corruptions"] = spot_corruptions(network, test, device=device)
    measures = dict(record.measures)
    if task.ranks and "ranked" not in measures:
        images = load(config.data.name, split="train", root=task.data_dir, image_size=config.data.image_size)
        measures |= {**score_ranks(network, images, config.method, device=device), "ranked": 1.0}
    final = record_of(task.folder, jobs=record.jobs, measures=measures, note=record.note)
    final.figures, final.pace = {**better(record.figures, final.figures), **figures}, record.pace
    final.write(task.out / RECORDS)


def take_up(task: Task) -> Outcome:
    """Put what `bullettrain evaluate` has found since into the record of a finished run, where that is here."""
    kept = task.record()
    try:
        if kept is not None and kept.finished and _is_trained(RunFolder(task.folder)):
            _so_far(task, kept).write(task.out / RECORDS)
    except RunError as error:
        return Outcome(task.name, problem=str(error))
    return Outcome(task.name)


def _so_far(task: Task, kept: Record | None) -> Record:
    """The record of a run as its folder has it, with what was ``kept`` before and is not in the folder."""
    jobs = kept.jobs if kept is not None and kept.finished else _most_jobs(task)
    record = record_of(task.folder, jobs=jobs, measures=kept.measures if kept else None)
    if kept is not None:
        record.figures, record.note, record.pace = better(kept.figures, record.figures), kept.note, kept.pace
    return record


def _is_trained(folder: RunFolder) -> bool:
    """Whether a training lies here that came to its end."""
    ends = [record for record in folder.records() if record.get("kind") == "end"] if folder.exists else []
    return bool(ends) and ends[-1].get("reason") == "finished"


def _most_jobs(task: Task) -> int:
    """The most runs that have shared the device while this one trained, also before it was stopped."""
    runs = RunFolder(task.out / RUNS)
    runs.path.mkdir(parents=True, exist_ok=True)
    file = runs.path / f".{task.name}.jobs"
    most = max(task.jobs, int(file.read_text()) if file.exists() else 1)
    runs.write(file.name, str(most).encode())
    return most


def merged(tasks: list[Task]) -> list[Task]:
    """One task a run: rows that are the same run share it, and what is wanted of any of them is wanted of it."""
    found: dict[str, Task] = {}
    for task in tasks:
        first = found.setdefault(task.name, task)
        attacks = tuple(dict.fromkeys((*first.attacks, *task.attacks)))
        labels = dict.fromkeys([*first.label.split(SAME), task.label])
        found[task.name] = dataclasses.replace(
            first, attacks=attacks, ranks=first.ranks or task.ranks, label=SAME.join(labels)
        )
    return list(found.values())
