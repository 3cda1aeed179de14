"""How long runs will take, from speed that was measured: in earlier runs, on record, or in a second here and now."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bullettrain.evaluation.specs import PGD, AutoAttack, Defaults, parse_attack
from bullettrain.oracle import OracleSeparation
from bullettrain.reproduction.records import Record, read_records
from bullettrain.reproduction.rows import Task
from bullettrain.training.config import Config
from bullettrain.training.folder import RunError, environment
from bullettrain.training.setup import Place, Shape, make_network

RESULTS = Path(__file__).resolve().parents[3] / "results"
"""Speeds on record, in a checkout: of steps alone, and of whole trainings."""
IMAGES = {"digits": (1438, 359), "mnist": (60000, 10000), "cifar10": (50000, 10000), "cifar100": (50000, 10000)}
SHAPES = {
    "digits": Shape(10, 1, 8),
    "mnist": Shape(10, 1, 28),
    "cifar10": Shape(10, 3, 32),
    "cifar100": Shape(100, 3, 32),
}
MINED = {"boundary": 0.28, "robust": 0.54, "outlier": 0.18}
"""Shares that the paper reports for TRADES."""
LEFT = 0.5
"""Share of the images that are still to be attacked, on average: the lost are left alone."""
AUTOATTACK = 200 + LEFT * (9 * 100 * 2 + 9 * 100 * 3 + 5000)
"""Passes an image: APGD, its targets, FAB's, and Square's queries."""
SLOWER = {"float32": 7.0, "tf32": 2.0, "bf16": 1.0}
"""How much slower networks are judged than trained on a GPU, by precision. A guess, from what its units can do."""


KINDS = {"first_layer": "YOPO", "align": "GradAlign", "carry": "Free"}
"""Methods by the setting that makes them."""
Key = tuple[str, str, bool, str]
"""Network, dataset, whether examples are told apart (with BulletTrain, passes are of smaller batches), and which of the
methods whose steps are captured as they are, if any: their passes cost more."""


@dataclass(frozen=True)
class Speed:
    """Passes of one image a second, and where that comes from."""

    passes: float
    source: str


def _recorded() -> dict[str, Record]:
    """Trainings on record in a checkout; a file that cannot be read is nobody's concern here."""
    try:
        return read_records(RESULTS / "reproduce" / "short" / "records")
    except RunError:
        return {}


@dataclass
class Estimator:
    """Seconds of tasks on this device."""

    place: Place
    records: Mapping[str, Record] = field(default_factory=dict)
    known: dict[Key, Speed] = field(default_factory=dict)
    recorded: Mapping[str, Record] = field(default_factory=_recorded)
    measured: dict[tuple[str, str], Speed] = field(default_factory=dict)

    def seconds(self, task: Task) -> tuple[float, float]:
        """Training and judging that are left, each in seconds of a device that does nothing else."""
        config = task.config
        speed = self.speed(config)
        train, test = IMAGES.get(config.data.name, (50000, 10000))
        train = config.data.train_size or train - config.data.validation
        epochs = config.training.epochs - task.epochs_done
        training = epochs * train * config.training.replays * passes(config) / speed.passes
        images = min(task.size or test, test)
        record = task.record()
        judging = sum(_judging(attack, config) for attack in task.missing(record)) * images
        if not judging:
            return training, 0.0
        slower = SLOWER[task.precision or "float32"] if self.place.device.type == "cuda" else 1.0
        return training, judging / self.speed(config, judged=True).passes * slower

    def speed(self, config: Config, *, judged: bool = False) -> Speed:
        """Of the config's network on its data: of runs here, else as recorded for this device, else measured now.

        ``judged``: by plain attacks on everyone, however it was trained.
        """
        mined = config.method.budget().uniform_steps is None and not judged
        key = config.network.name, config.data.name, mined, "" if judged else _kind(config.to_dict()["method"])
        if key not in self.known:
            name = environment(self.place.device)["device"]
            self.known[key] = (
                _of_runs(self.records.values(), key, name, "here")
                or _of_bench(key, name)
                or _of_runs(self.recorded.values(), key, name, "on record")
                or self._now(config)
            )
        return self.known[key]

    def _now(self, config: Config) -> Speed:
        """As it is here and now, for all runs of a network on its data alike."""
        key = config.network.name, config.data.name
        if key not in self.measured:
            self.measured[key] = self._measure(config)
        return self.measured[key]

    def _measure(self, config: Config) -> Speed:
        """A second of forwards and backwards on noise."""
        device = self.place.device
        shape = SHAPES.get(config.data.name, SHAPES["cifar10"])
        network = make_network(config.network, shape).to(device)
        size = 128 if device.type == "cuda" or config.network.name == "small-cnn" else 4
        x = torch.rand(size, shape.channels, shape.image_size, shape.image_size, device=device)
        half = device.type == "cuda" and config.training.precision != "float32"
        done, began = -1, 0.0  # the first is not counted
        while done < 3 or time.perf_counter() - began < 0.5:
            if done == 0:
                _wait(device)
                began = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                loss = network(x).float().logsumexp(dim=1).sum()
            loss.backward()
            done += 1
        _wait(device)
        return Speed(3 * size * done / (time.perf_counter() - began), "half a second of passes on noise, here and now")


def passes(config: Config) -> float:
    """Counted passes an example that the config is expected to take: at the paper's shares where it mines."""
    objective, budget = config.method.make_objective(), config.method.budget()
    if budget.uniform_steps is not None:
        return float(objective.cost.work(steps=budget.boundary, touched=min(budget.boundary, 1), selects=False).total)
    parts = [(share, getattr(budget, name)) for name, share in MINED.items()]
    work = objective.cost.work(steps=sum(s * n for s, n in parts), touched=sum(s for s, n in parts if n))
    oracle = OracleSeparation().passes_per_example if config.method.separation == "oracle" else 0
    return float(work.total) + oracle


def _judging(attack: str, config: Config) -> float:
    """Passes an image."""
    found = parse_attack(attack, Defaults())
    if isinstance(found, PGD):
        return 1 + LEFT * found.restarts * (2 * found.steps + 1)
    if isinstance(found, AutoAttack):
        return AUTOATTACK
    return 75.0 if attack == "corruptions" else 1.0


def _kind(method: Mapping[str, Any]) -> str:
    """Which of the methods that have a setting of their own it is; none: empty."""
    return next((kind for setting, kind in KINDS.items() if method.get(setting)), "")


def _of_runs(records: Iterable[Record], key: Key, device: str, where: str) -> Speed | None:
    def of(record: Record) -> Key:
        config = record.config
        return config["network"]["name"], config["data"]["name"], record.mined, _kind(config["method"])

    rates = [
        record.work * record.examples / record.alone
        for record in records
        if of(record) == key
        and record.pace.get("environment", record.environment).get("device") == device
        and record.alone
    ]
    source = f"{len(rates)} finished run{'s' * (len(rates) != 1)} {where}"
    return Speed(sorted(rates)[len(rates) // 2], source) if rates else None


def _of_bench(key: Key, device: str) -> Speed | None:
    """The last engine on record for the network on this device, which is the fastest; none of a method of a kind."""
    *what, mined, kind = key
    if kind:
        return None
    for file in sorted((RESULTS / "bench").glob("*.json")):
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        config = content["config"]
        there = config["network"]["name"], config["data"]["name"], content["environment"]["device"]
        if there == (*what, device):
            row = [row for row in content["rows"] if row["method"] == ("bullettrain" if mined else "baseline")][-1]
            return Speed(row["work"] * row["examples_per_second"], f"results/bench/{file.name}")
    return None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
