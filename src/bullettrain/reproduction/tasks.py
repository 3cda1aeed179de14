"""A task: a run to train and evaluate, and its progress."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from bullettrain.config.sections import Config
from bullettrain.evaluation.specs import Defaults, parse_attack
from bullettrain.precision import Precision
from bullettrain.reproduction.records import Record, read_record, run_name
from bullettrain.reproduction.studies import RANKS
from bullettrain.run_folder import RunError, RunFolder

RECORDS, RUNS = "records", "runs"
ROW_SEPARATOR = " = "
"""Separates the names of rows that share a run."""
DONE, ON_RECORD = "done", "on record"


@dataclass(frozen=True)
class Task:
    """A run to train and evaluate.

    Args:
        config: settings of the run.
        out: folder of the reproduction.
        attacks: attacks as `--attack` takes them, or ``RANKS``. Empty to train only.
        images: number of test images for attacks after training; 0 for all.
        precision: precision of attacks after training. None keeps existing results and uses float32 for new ones.
        corruptions: folder of the CIFAR-C files; None to corrupt images on the fly.
        data_dir: folder of datasets.
        device: device to run on.
        report: whether to write the run's report.html.
        jobs: number of concurrent runs.
        label: rows of the task, for messages.
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
        """The name of the run, its folder and its record."""
        return run_name(self.config)

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(self.out / RUNS / self.name)

    @property
    def trained(self) -> bool:
        """Whether the run in the folder finished training."""
        return self.folder.exists and self.folder.finished

    def record(self) -> Record | None:
        """Return the record of the run, or None."""
        file = self.out / RECORDS / f"{self.name}.json"
        if (record := read_record(file)) is not None:
            network = record.config.get("network")
            self._check_network(network.get("name") if isinstance(network, dict) else network, file)
        return record

    def folder_config(self) -> Config:
        """Return the configuration of the run in its folder; settings that do not change the weights may differ."""
        config = self.folder.config()
        self._check_network(config.network.name, self.folder.path / "config.yaml")
        return config

    def _check_network(self, name: object, file: Path) -> None:
        """Raise RunError if a file names another network than the task, which could be any function."""
        if name != self.config.network.name:
            raise RunError(f"{file} is of the network {name!r}, not of {self.config.network.name!r}; move it away")

    def missing(self, record: Record) -> list[str]:
        """Return the attacks that ``record`` lacks, or has on too few images or not in float32 as asked."""
        total = record.figures.get("clean", {}).get("examples", 0)

        def recorded(name: str) -> bool:
            if name == RANKS:
                return "ranked" in record.measures
            figure = record.figures.get(name)
            if figure is None or (self.precision == "float32" and "precision" in figure):
                return False
            # Corruptions have their own number of images.
            return name == "corruptions" or bool(figure["examples"] >= min(self.images or total, total))

        return [attack for attack in self.attacks if not recorded(attack_name(attack))]

    def state(self) -> str:
        """Return the state: done, trained, "epoch 3 of 30", new, or "on record".

        "on record" is a finished run whose folder is gone and whose record lacks something. It is not trained again.
        """
        record = self.record()
        if record is not None and record.finished:
            if not self.missing(record):
                return DONE
            if not self.folder.exists:
                return ON_RECORD
        epochs, planned = self.epochs_done(), self.config.training.epochs
        return "trained" if epochs == planned else f"epoch {epochs} of {planned}" if epochs else "new"

    def epochs_done(self) -> int:
        """Return the number of trained epochs."""
        records = self.folder.records()
        return max((int(one["epoch"]) for one in records if one.get("kind") == "epoch"), default=0)


def attack_name(attack: str) -> str:
    """Return the name of an attack in records; ``attack`` is as `--attack` takes it."""
    return attack if attack == RANKS else parse_attack(attack, Defaults()).name


def merged(tasks: list[Task]) -> list[Task]:
    """Merge tasks of the same run into one with the attacks of all."""
    unique: dict[str, Task] = {}
    for task in tasks:
        first = unique.setdefault(task.name, task)
        attacks = tuple(dict.fromkeys((*first.attacks, *task.attacks)))
        images = max(first.images, task.images) if first.images and task.images else 0  # 0: all
        label = ROW_SEPARATOR.join(dict.fromkeys([*first.label.split(ROW_SEPARATOR), task.label]))
        unique[task.name] = dataclasses.replace(first, attacks=attacks, images=images, label=label)
    return list(unique.values())
