"""What is kept of a run: one JSON file with configuration, seed, device, commit, seconds, counted work and figures.

Tables, figures and claims are made from these files alone, so that they can be made again wherever the files are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullettrain.corruptions.table import AVERAGED
from bullettrain.evaluation.results import Entry, Result, Store, key_of
from bullettrain.extras import extra
from bullettrain.reporting.plotting import thin
from bullettrain.reporting.run import EPOCH_COLUMNS, SHARES, STEP_COLUMNS, Batch, Run, read_run
from bullettrain.schema import conform
from bullettrain.training.config import Config, flatten
from bullettrain.training.folder import RunError, RunFolder

FORMAT = 1
WEIGHTS = "last"
"""What the paper judges."""
CURVE = ("step", "epoch", *SHARES, *(f"svar_{name}" for name in SHARES), "robust_accuracy", "loss")
HOW = {
    f"training.{key}"
    for key in (
        *("seed", "engine", "joint", "bucket", "channels_last", "compile", "average", "threads", "log_every"),
        *("save_minutes", "probe"),
    )
} | {"evaluation.batch_size", "evaluation.search"}
"""Settings that say how a run is computed, not what is learnt: a row's run may have others."""
WHERE = ("device", "torch", "commit")
"""What has to be the same for paces to be compared."""
MINING = {"method.gamma", "method.momentum"}
"""Settings that mean nothing where all get the same steps."""


def identity(config: Config) -> str:
    """Changes with what is learnt and how it is judged; not with the seed, nor with settings left as they are."""
    usual = flatten(Config().to_dict())
    idle = HOW if config.method.budget().uniform_steps is None else HOW | MINING
    changed = {key: v for key, v in flatten(config.to_dict()).items() if v != usual[key] and key not in idle}
    return key_of(**changed)[:8]


def run_name(config: Config) -> str:
    """A folder's name for the run, seed included."""
    method = config.method
    steps = f"b{method.boundary}-r{method.robust}-o{method.outlier}"
    return f"{config.recipe}-{method.objective}-{steps}-{identity(config)}-s{config.training.seed}"


@dataclass
class Record:
    """One run, with one seed."""

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    reason: str
    seconds: float
    """Of training; without captures, compilations and evaluation."""
    capture_seconds: float
    jobs: int
    """Runs that shared the device: with more than one, seconds say nothing."""
    epochs: int
    examples: float
    work: float
    """Counted passes an example."""
    shares: dict[str, float]
    figures: dict[str, dict[str, Any]]
    """By attack: accuracy as a share, on how many images, which of them, the search's precision; of corruptions over
    how many, each at its severities, and in how many each image is right."""
    averaged: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The same of the averaged weights, where training judged them."""
    measures: dict[str, float] = field(default_factory=dict)
    """What else was measured, as the rank correlation with the oracle's classes."""
    warnings: list[str] = field(default_factory=list)
    curve: dict[str, list[float | None]] = field(default_factory=dict)
    batch: dict[str, Any] | None = None
    pace: dict[str, Any] = field(default_factory=dict)
    """Seconds of an epoch with the device to itself, timed after training (`--pace`), where and how; empty: it was not.
    """
    note: str = ""
    format: int = FORMAT

    @property
    def seed(self) -> int:
        """Of everything random."""
        return int(self.config["training"]["seed"])

    @property
    def finished(self) -> bool:
        """Whether training came to its end."""
        return self.reason == "finished"

    @property
    def alone(self) -> float | None:
        """Seconds of training with the device to itself: by its pace, else those that the run took if it had."""
        if self.pace:
            return float(self.pace["epoch_seconds"]) * self.epochs
        return self.seconds if self.jobs == 1 else None

    @property
    def sequential(self) -> float | None:
        """The paper's cost of a step: passes one after another; None for methods that it gives none for."""
        method = self.config["method"]
        if method.get("first_layer") or method.get("carry") or method.get("align"):
            return None
        if method["objective"] == "augmix":
            return 1.0 + 2.0 * self._spent if method.get("jsd", True) else 1.0
        return 1.0 + self._spent

    @property
    def _spent(self) -> float:
        return sum(self.shares[name] * float(self.config["method"][name]) for name in SHARES)

    def value(self, metric: str) -> float | None:
        """Accuracies and shares in percent, seconds as minutes, the rest as it is; None where it is not known."""
        if metric in self.figures:
            return 100 * float(self.figures[metric]["accuracy"])
        if metric in SHARES:
            return 100 * self.shares[metric] if self.mined else None
        if metric == "minutes":
            return None if self.alone is None else self.alone / 60
        if metric in self.measures:
            return self.measures[metric]
        return self._of_curve(metric)

    @property
    def mined(self) -> bool:
        """Whether examples were told apart."""
        return len({self.config["method"][name] for name in SHARES}) > 1

    def _of_curve(self, metric: str) -> float | None:
        """What the course of training says of the classes."""
        columns = {name: _floats(values) for name, values in self._course().items()}
        if not self.mined or not columns:
            return None
        first, last = ({name: columns[name][at] for name in SHARES} for at in (0, -1))
        if metric == "svar_order":
            means = np.stack([columns[f"svar_{name}"] for name in SHARES])
            known = np.isfinite(means).all(axis=0)
            order = (np.diff(means[:, known], axis=0) >= 0).all(axis=0)
            return 100 * float(order.mean()) if known.any() else None
        found = {
            "robust_rise": last["robust"] - first["robust"],
            "outlier_fall": first["outlier"] - last["outlier"],
            "boundary_least": min(last["robust"], last["outlier"]) - last["boundary"],
        }.get(metric)
        return 100 * float(found) if found is not None and math.isfinite(found) else None

    def _course(self) -> dict[str, list[float | None]]:
        """Its curve without entries of a few steps, which chance moves: older runs have them where an epoch ends.

        Where a long curve was thinned when it was recorded, they are part of their neighbours.
        """
        steps = _floats(self.curve.get("step", []))
        if len(steps) < 3:
            return self.curve
        lengths = np.diff(steps, prepend=0.0)
        kept = lengths >= np.median(lengths) / 4
        return {name: [v for v, keep in zip(values, kept, strict=True) if keep] for name, values in self.curve.items()}

    def as_run(self) -> Run:
        """As the report's figures take it, from what is kept of its course."""

        def table(columns: Sequence[str], rows: Mapping[str, list[float | None]]) -> dict[str, Any]:
            length = len(next(iter(rows.values()), []))
            return {name: _floats(rows.get(name, [None] * length)) for name in columns}

        batch = None
        if self.batch is not None:
            svar, steps, category = (np.array(self.batch[key]) for key in ("svar", "steps", "category"))
            batch = Batch(float(self.batch["epoch"]), svar.astype(float), steps, category)
        return Run(
            folder=Path(self.name),
            config=self.config,
            steps=table(STEP_COLUMNS, self._course()),
            epochs=table(EPOCH_COLUMNS, {}),
            batch=batch,
            evaluations=[],
            warnings=[],
            ended=self.reason,
            totals={},
            samples=None,
        )

    def write(self, folder: Path) -> Path:
        """Keep it in ``folder``, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False)
        RunFolder(folder).write(f"{self.name}.json", f"{text}\n".encode())
        return folder / f"{self.name}.json"


def record_of(path: Path, *, jobs: int = 1, measures: Mapping[str, float] | None = None, note: str = "") -> Record:
    """What is to be kept of the run in ``path``: its records, and what `bullettrain evaluate` has found since."""
    with extra("a run's folder"):
        import yaml
    folder, run = RunFolder(path), read_run(path)
    config = folder.config()
    environment = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8")).get("environment", {})
    end: dict[str, Any] = next((r for r in reversed(folder.records()) if r.get("kind") == "end"), {})
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    for judged in run.evaluations:
        figure: dict[str, Any] = {"accuracy": judged.accuracy, "examples": judged.examples}
        figure |= {} if judged.precision == "float32" else {"precision": judged.precision}
        figure |= {"fingerprint": judged.fingerprint, "survived": judged.survived} if judged.survived else {}
        figures.setdefault(judged.weights, {})[judged.attack] = figure
    found = figures.setdefault(WEIGHTS, {})
    for entry in Store(path).entries:
        if entry.weights != WEIGHTS:
            continue
        for result in entry.results:
            if result.role != "attack":
                continue
            found = better(found, {result.name: figure_of(entry, result)})
    curve = {name: [_short(v) for v in thin(run.steps["epoch"], run.steps[name])[1]] for name in CURVE}
    batch = run.batch
    return Record(
        name=run_name(config),
        config=config.to_dict(),
        environment=environment,
        reason=str(end.get("reason", "unfinished")),
        seconds=float(end.get("seconds", 0.0)),
        capture_seconds=float(end.get("capture_seconds", 0.0)),
        jobs=jobs,
        epochs=int(end.get("epochs", 0)),
        examples=float(end.get("examples", 0)),
        work=float(end.get("work") or 0.0),
        shares={name: float(end.get(name, 0.0)) for name in SHARES},
        figures=found,
        averaged=figures.get("averaged", {}),
        measures=dict(measures or {}),
        warnings=list(dict.fromkeys(text for _, text in run.warnings)),
        curve=curve if run.steps["step"].size else {},
        batch=None
        if batch is None
        else {
            "epoch": batch.epoch,
            "svar": [_short(v) for v in batch.svar],
            "steps": batch.steps.tolist(),
            "category": batch.category.tolist(),
        },
        note=note,
    )


def figure_of(entry: Entry, result: Result) -> dict[str, Any]:
    """What a record keeps of a result of `bullettrain evaluate`."""
    about: dict[str, Any] = {"accuracy": result.accuracy, "examples": result.examples}
    if result.corruptions:
        found = result.corruptions["accuracy"]
        averaged = {name: found[name] for name in AVERAGED if name in found}
        about |= {"over": result.corruptions["over"], "corruptions": averaged}
        if "kept" in result.corruptions:  # not in evaluations from before it was kept
            about |= {key: result.corruptions[key] for key in ("fingerprint", "kept")}
    about |= {} if result.precision == "float32" else {"precision": result.precision}
    if result.survived:
        about |= {"fingerprint": entry.fingerprint, "survived": result.survived}
        about |= {"among": entry.among} if entry.among else {}
    return about


def better(old: Mapping[str, dict[str, Any]], new: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of two figures of an attack the one on more images, then in float32, then that knows more, then the new one."""

    def worth(figure: Mapping[str, Any]) -> tuple[int, bool, bool]:
        return figure["examples"], "precision" not in figure, "kept" in figure or "survived" in figure

    kept = {name: figure for name, figure in old.items() if name in new and worth(figure) > worth(new[name])}
    return {**old, **new, **kept}


def read_record(file: Path) -> Record | None:
    """The record in ``file``; None where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}")
        record: Record = conform(content, Record)
        return record
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} is no record that this version can read ({error}); move it away") from None


def read_records(folder: Path) -> dict[str, Record]:
    """All records in ``folder``, by name."""
    found = (read_record(file) for file in sorted(folder.glob("*.json")))
    return {record.name: record for record in found if record is not None}


def _floats(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([math.nan if v is None else v for v in values], dtype=np.float64)


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
