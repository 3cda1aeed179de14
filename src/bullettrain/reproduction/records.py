"""Records of runs: one JSON file per run with its settings, device, commit, time, counted work and accuracies.

Tables and figures are made from records alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bullettrain.config.format1 import translate
from bullettrain.config.method import OBJECTIVES
from bullettrain.config.sections import Config
from bullettrain.corruptions.table import AVERAGED
from bullettrain.errors import raised_as
from bullettrain.evaluation.results import Entry, Result, Store
from bullettrain.evaluation.specs import threat_of
from bullettrain.reporting.plotting import thin
from bullettrain.run_folder import SHARES, RunError, RunFolder, RunLog, Table
from bullettrain.schema import conform

FORMAT = 1
WEIGHTS = "last"
"""The weights that the paper evaluates."""
CURVE = ("step", "epoch", *SHARES, *(f"svar_{name}" for name in SHARES), "robust_accuracy", "loss")
Figure = dict[str, Any]
"""An accuracy as a share, its number of images, which images were right, and the precision of the attack; for
corruptions, the accuracy of each at every severity."""


def run_name(config: Config) -> str:
    """Return the name of a run's folder and record, which ends with the seed."""
    method = config.method
    steps = f"b{method.boundary}-r{method.robust}-o{method.outlier}"
    return f"{config.recipe}-{method.objective}-{steps}-{config.identity()}-s{config.training.seed}"


@dataclass
class Record:
    """The record of a run with one seed."""

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    reason: str
    seconds: float
    """Training time, without compiling, capturing and evaluation."""
    epochs: int
    examples: float
    work: float
    """Counted passes per example."""
    shares: dict[str, float]
    figures: dict[str, Figure]
    """Accuracies by attack."""
    jobs: int = 1
    """Concurrent runs on the device; more than one disables timing."""
    capture_seconds: float = 0.0
    averaged: dict[str, Figure] = field(default_factory=dict)
    """Accuracies of the averaged weights."""
    measures: dict[str, float] = field(default_factory=dict)
    """Other measurements, e.g. the rank correlation with the oracle's categories."""
    warnings: list[str] = field(default_factory=list)
    curve: dict[str, list[float | None]] = field(default_factory=dict)
    batch: dict[str, Any] | None = None
    timing: dict[str, Any] = field(default_factory=dict)
    """Result of `--timing`: seconds of an epoch on an otherwise idle device, measured after training."""
    note: str = ""
    format: int = FORMAT

    @property
    def seed(self) -> int:
        """The random seed."""
        return int(self.config["training"]["seed"])

    @property
    def stem(self) -> str:
        """The name without the seed."""
        return self.name.rpartition("-s")[0]

    @property
    def finished(self) -> bool:
        """Whether training finished."""
        return self.reason == "finished"

    @property
    def mined(self) -> bool:
        """Whether the categories got different numbers of steps."""
        return len({self.config["method"][name] for name in SHARES}) > 1

    @property
    def timed_in(self) -> dict[str, Any]:
        """The environment in which the time was measured."""
        return dict(self.timing.get("environment", self.environment))

    @property
    def timed_seconds(self) -> float | None:
        """Training time on an otherwise idle device, or None if unknown."""
        if self.timing:
            return float(self.timing["epoch_seconds"]) * self.epochs
        return self.seconds if self.jobs == 1 else None

    @property
    def sequential(self) -> float | None:
        """The paper's cost of a step: sequential passes. None for methods without one."""
        method = self.config["method"]
        if method.get("first_layer") or OBJECTIVES[method["objective"]].one_by_one:
            return None
        steps = sum(self.shares[name] * float(method[name]) for name in SHARES)
        views = 1 if method["objective"] != "augmix" else 2 if method.get("jsd", True) else 0
        return 1.0 + views * steps

    def value(self, metric: str) -> float | None:
        """Return a metric, or None if unknown. Accuracies and shares are in percent."""
        if metric in self.figures:
            return 100 * float(self.figures[metric]["accuracy"])
        if metric in SHARES:
            return 100 * self.shares[metric] if self.mined else None
        if metric == "minutes":
            return None if self.timed_seconds is None else self.timed_seconds / 60
        return self.measures[metric] if metric in self.measures else self._of_curve(metric)

    def _of_curve(self, metric: str) -> float | None:
        """Return a metric of the training curve in percent, or None."""
        columns = self.course()
        if not self.mined or not columns:
            return None
        outlier, boundary, robust = (columns[name] for name in SHARES)
        means = np.stack([columns[f"svar_{name}"] for name in SHARES])
        means = means[:, np.isfinite(means).all(axis=0)]
        value = {
            "svar_order": (np.diff(means, axis=0) >= 0).all(axis=0).mean() if means.size else math.nan,
            "robust_rise": robust[-1] - robust[0],
            "outlier_fall": outlier[0] - outlier[-1],
            "boundary_least": min(robust[-1], outlier[-1]) - boundary[-1],
        }.get(metric, math.nan)
        return 100 * float(value) if math.isfinite(value) else None

    def course(self) -> Table:
        """Return the curve without entries of few steps, which older runs have at the end of an epoch."""
        columns = {name: np.array(values, dtype=np.float64) for name, values in self.curve.items()}
        lengths = np.diff(columns["step"], prepend=0.0) if columns else np.zeros(0)
        kept = lengths >= np.median(lengths) / 4 if len(lengths) else slice(0)
        return {name: column[kept] for name, column in columns.items()}

    def write(self, folder: Path) -> None:
        """Write the record to ``folder``."""
        RunFolder(folder).write_json(f"{self.name}.json", asdict(self))


def record_of(path: Path, *, jobs: int = 1, kept: Record | None = None) -> Record:
    """Create the record of the run in ``path``, with the results of `bullettrain evaluate`.

    Args:
        path: folder of the run.
        jobs: number of concurrent runs.
        kept: earlier record, for results that are not in the folder.
    """
    run, config = RunLog.read(path), RunFolder(path).config()
    figures: dict[str, dict[str, Figure]] = {WEIGHTS: {}}
    for item in run.evaluations:
        images = {"fingerprint": item.fingerprint, "survived": item.survived} if item.survived else {}
        figure = _figure(item.accuracy, item.examples, item.precision) | images
        figures.setdefault(item.weights, {})[item.attack] = figure
    threat, usual = (config.method.norm, config.method.eps), threat_of(config)
    for entry in Store(path).entries:
        for result in entry.results:
            if result.role == "attack" and result.threat in (None, threat) and usual.is_usual(result.attack):
                known = figures.setdefault(entry.weights, {})
                figures[entry.weights] = better(known, {result.name: figure_of(entry, result)})
    last = figures[WEIGHTS]
    total = {name: value if math.isfinite(value) else 0.0 for name, value in run.totals.items()}
    about: dict[str, Any] = {key: total[key] for key in ("seconds", "capture_seconds", "examples", "work")}
    about |= {"epochs": int(total["epochs"]), "shares": {name: total[name] for name in SHARES}, "jobs": jobs}
    about |= {"environment": dict(run.section("environment")), "reason": run.ended or "unfinished"}
    about |= {"warnings": list(dict.fromkeys(text for _, text in run.warnings))}
    if run.steps["step"].size:
        about["curve"] = {name: [_short(v) for v in thin(run.steps["epoch"], run.steps[name])[1]] for name in CURVE}
    if run.batch is not None:
        about["batch"] = {key: np.asarray(value).tolist() for key, value in vars(run.batch).items()}
    if kept is not None:
        last = better(kept.figures, last)
        about |= {"measures": dict(kept.measures), "timing": kept.timing, "note": kept.note}
        figures = {"averaged": kept.averaged} | figures
    averaged = figures.get("averaged", {})
    return Record(name=run_name(config), config=config.to_dict(), figures=last, averaged=averaged, **about)


def figure_of(entry: Entry, result: Result) -> Figure:
    """Return the entry of a record for a result of `bullettrain evaluate`."""
    figure = _figure(result.accuracy, result.examples, result.precision)
    if result.corruptions:
        accuracy = result.corruptions["accuracy"]
        figure["corruptions"] = {name: accuracy[name] for name in AVERAGED if name in accuracy}
        keys = ("over", "fingerprint", "kept")  # older evaluations lack the last two
        figure |= {key: result.corruptions[key] for key in keys if key in result.corruptions}
    if result.survived:
        figure |= {"fingerprint": entry.fingerprint, "survived": result.survived}
        figure |= {"among": entry.among} if entry.among else {}
    return figure


def _figure(accuracy: float, examples: float, precision: str = "float32") -> Figure:
    searched = {} if precision == "float32" else {"precision": precision}
    return {"accuracy": accuracy, "examples": examples, **searched}


def better(old: Mapping[str, Figure], new: Mapping[str, Figure]) -> dict[str, Figure]:
    """Merge accuracies, preferring more images, then float32, then known outcomes of each image, then the new one."""

    def worth(figure: Figure) -> tuple[int, bool, bool]:
        return figure["examples"], "precision" not in figure, "kept" in figure or "survived" in figure

    kept = {name: figure for name, figure in old.items() if name in new and worth(figure) > worth(new[name])}
    return {**old, **new, **kept}


def read_record(file: Path) -> Record | None:
    """Read a record. Returns None if the file does not exist."""
    unread = f"{file} is no record that this version can read ({{error}}); move it away"
    with raised_as(RunError, unread, OSError, ValueError, KeyError, TypeError):
        if not file.exists():
            return None
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}")
        timing = content.pop("pace", {})  # its name in the first records
        record: Record = conform({"timing": timing, **content, "config": translate(content["config"])}, Record)
        return record


def read_records(folder: Path) -> dict[str, Record]:
    """Read all records in ``folder``, by name."""
    records = map(read_record, sorted(folder.glob("*.json")))
    return {record.name: record for record in records if record is not None}


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
