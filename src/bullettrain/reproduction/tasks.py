"""What is to be run: a row's run, all that is wanted of it, and how far it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bullettrain.config.sections import Config
from bullettrain.evaluation.specs import Defaults, parse_attack
from bullettrain.precision import Precision
from bullettrain.reproduction.records import Record, read_record, run_name
from bullettrain.reproduction.studies import RANKS
from bullettrain.run_folder import RunError, RunFolder

RECORDS, RUNS = "records", "runs"
SAME = " = "
"""Between the names of rows that are the same run."""
DONE, ON_RECORD = "done", "on record"


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
        if (record := read_record(file)) is not None:
            network = record.config.get("network")
            self._check_network(network.get("name") if isinstance(network, dict) else network, file)
        return record

    def folder_config(self) -> Config:
        """The configuration of the run in its folder; how it is computed may differ from what is asked for now."""
        config = self.folder.config()
        self._check_network(config.network.name, self.folder.path / "config.yaml")
        return config

    def _check_network(self, name: object, file: Path) -> None:
        """A file must not name another network, which may be any function, than this task."""
        if name != self.config.network.name:
            raise RunError(f"{file} is of the network {name!r}, not of {self.config.network.name!r}; move it away")

    def missing(self, record: Record) -> list[str]:
        """What is wanted and not in ``record``: on enough images, and in float32 where that is asked for."""
        whole = record.figures.get("clean", {}).get("examples", 0)

        def there(name: str) -> bool:
            if name == RANKS:
                return "ranked" in record.measures
            figure = record.figures.get(name)
            if figure is None or (self.precision == "float32" and "precision" in figure):
                return False
            # Corruptions have a number of images of their own.
            return name == "corruptions" or bool(figure["examples"] >= min(self.images or whole, whole))

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
