"""What is kept of a run: one JSON file with configuration, seed, device, commit, seconds, counted work and figures.

Tables, figures and claims are made from these files alone, so that they can be made again wherever the files are. Runs
of the paper's own network stand in one CSV file instead, a line a run.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bullettrain.config.format1 import translate
from bullettrain.config.sections import Config
from bullettrain.corruptions.table import AVERAGED
from bullettrain.evaluation.results import Entry, Result, Store
from bullettrain.reporting.plotting import thin
from bullettrain.reproduction.rows import Row
from bullettrain.reproduction.scales import Scale
from bullettrain.run_folder import SHARES, RunError, RunFolder, RunLog, Table
from bullettrain.schema import conform

FORMAT = 1
WEIGHTS = "last"
"""What the paper evaluates."""
CURVE = ("step", "epoch", *SHARES, *(f"svar_{name}" for name in SHARES), "robust_accuracy", "loss")
CSV_ATTACKS = ("clean", "pgd20", "pgd100x10", "autoattack")
CSV_COLUMNS = (
    *("scale", "row", "seed", "epochs", "weights", *CSV_ATTACKS, "autoattack_images", "boundary", "robust", "outlier"),
    *("passes", "seconds_per_epoch", "device", "commit"),
)
Figure = dict[str, Any]
"""An accuracy as a share, on how many images, which of them, the search's precision; of corruptions over how
many, each at its severities, and in how many each image is right."""


def run_name(config: Config) -> str:
    """A folder's name for the run, seed included."""
    method = config.method
    steps = f"b{method.boundary}-r{method.robust}-o{method.outlier}"
    return f"{config.recipe}-{method.objective}-{steps}-{config.identity()}-s{config.training.seed}"


@dataclass
class Record:
    """One run, with one seed."""

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    reason: str
    seconds: float
    """Of training; without captures, compilations and evaluation."""
    epochs: int
    examples: float
    work: float
    """Counted passes an example."""
    shares: dict[str, float]
    figures: dict[str, Figure]
    """By attack."""
    jobs: int = 1
    """Concurrent runs on the device; more than one disables timing."""
    capture_seconds: float = 0.0
    averaged: dict[str, Figure] = field(default_factory=dict)
    """The same of the averaged weights, where training evaluated them."""
    measures: dict[str, float] = field(default_factory=dict)
    """What else was measured, as the rank correlation with the oracle's classes."""
    warnings: list[str] = field(default_factory=list)
    curve: dict[str, list[float | None]] = field(default_factory=dict)
    batch: dict[str, Any] | None = None
    timing: dict[str, Any] = field(default_factory=dict)
    """Seconds of an epoch with the device to itself, measured after training (`--timing`), where and how."""
    note: str = ""
    format: int = FORMAT

    @property
    def seed(self) -> int:
        """Of everything random."""
        return int(self.config["training"]["seed"])

    @property
    def stem(self) -> str:
        """Its name but for the seed."""
        return self.name.rpartition("-s")[0]

    @property
    def finished(self) -> bool:
        """Whether training came to its end."""
        return self.reason == "finished"

    @property
    def mined(self) -> bool:
        """Whether examples were told apart."""
        return len({self.config["method"][name] for name in SHARES}) > 1

    @property
    def timed_in(self) -> dict[str, Any]:
        """The environment that its seconds are of."""
        return dict(self.timing.get("environment", self.environment))

    @property
    def alone(self) -> float | None:
        """Seconds of training with the device to itself: by its timing, else those that the run took if it had."""
        if self.timing:
            return float(self.timing["epoch_seconds"]) * self.epochs
        return self.seconds if self.jobs == 1 else None

    @property
    def sequential(self) -> float | None:
        """The paper's cost of a step: passes one after another; None for methods that it gives none for."""
        method = self.config["method"]
        if method.get("first_layer") or method.get("carry") or method.get("align"):
            return None
        steps = sum(self.shares[name] * float(method[name]) for name in SHARES)
        views = 1 if method["objective"] != "augmix" else 2 if method.get("jsd", True) else 0
        return 1.0 + views * steps

    def value(self, metric: str) -> float | None:
        """Accuracies and shares in percent, seconds as minutes, the rest as it is; None where it is not known."""
        if metric in self.figures:
            return 100 * float(self.figures[metric]["accuracy"])
        if metric in SHARES:
            return 100 * self.shares[metric] if self.mined else None
        if metric == "minutes":
            return None if self.alone is None else self.alone / 60
        return self.measures[metric] if metric in self.measures else self._of_curve(metric)

    def _of_curve(self, metric: str) -> float | None:
        """What the course of training says of the classes."""
        columns = self.course()
        if not self.mined or not columns:
            return None
        outlier, boundary, robust = (columns[name] for name in SHARES)
        means = np.stack([columns[f"svar_{name}"] for name in SHARES])
        known = means[:, np.isfinite(means).all(axis=0)]
        found = {
            "svar_order": (np.diff(known, axis=0) >= 0).all(axis=0).mean() if known.size else math.nan,
            "robust_rise": robust[-1] - robust[0],
            "outlier_fall": outlier[0] - outlier[-1],
            "boundary_least": min(robust[-1], outlier[-1]) - boundary[-1],
        }.get(metric, math.nan)
        return 100 * float(found) if math.isfinite(found) else None

    def course(self) -> Table:
        """Its curve without entries of a few steps, which chance moves: older runs have them where an epoch ends."""
        columns = {name: np.array(values, dtype=np.float64) for name, values in self.curve.items()}
        lengths = np.diff(columns["step"], prepend=0.0) if columns else np.zeros(0)
        kept = lengths >= np.median(lengths) / 4 if len(lengths) else slice(0)
        return {name: column[kept] for name, column in columns.items()}

    def write(self, folder: Path) -> None:
        """Keep it in ``folder``, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False)
        RunFolder(folder).write(f"{self.name}.json", f"{text}\n".encode())


def record_of(path: Path, *, jobs: int = 1, kept: Record | None = None) -> Record:
    """What is to be kept of the run in ``path``: its records, what `bullettrain evaluate` has found since, and what is
    on record of it already (``kept``) and not in the folder."""
    run, config = RunLog.read(path), RunFolder(path).config()
    figures: dict[str, dict[str, Figure]] = {WEIGHTS: {}}
    for found in run.evaluations:
        images = {"fingerprint": found.fingerprint, "survived": found.survived} if found.survived else {}
        figure = _figure(found.accuracy, found.examples, found.precision) | images
        figures.setdefault(found.weights, {})[found.attack] = figure
    last = figures[WEIGHTS]
    trained_at = (config.method.norm, config.method.eps)
    for entry in Store(path).entries:
        for result in entry.results if entry.weights == WEIGHTS else ():
            if result.role == "attack" and result.threat in (None, trained_at):
                last = better(last, {result.name: figure_of(entry, result)})
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
    averaged = figures.get("averaged", {})
    return Record(name=run_name(config), config=config.to_dict(), figures=last, averaged=averaged, **about)


def figure_of(entry: Entry, result: Result) -> Figure:
    """What a record keeps of a result of `bullettrain evaluate`."""
    figure = _figure(result.accuracy, result.examples, result.precision)
    if result.corruptions:
        found = result.corruptions["accuracy"]
        averaged = {name: found[name] for name in AVERAGED if name in found}
        figure |= {"over": result.corruptions["over"], "corruptions": averaged}
        known = ("fingerprint", "kept")  # not in evaluations from before they were kept
        figure |= {key: result.corruptions[key] for key in known if key in result.corruptions}
    if result.survived:
        figure |= {"fingerprint": entry.fingerprint, "survived": result.survived}
        figure |= {"among": entry.among} if entry.among else {}
    return figure


def _figure(accuracy: float, examples: float, precision: str = "float32") -> Figure:
    searched = {} if precision == "float32" else {"precision": precision}
    return {"accuracy": accuracy, "examples": examples, **searched}


def better(old: Mapping[str, Figure], new: Mapping[str, Figure]) -> dict[str, Figure]:
    """Of two figures of an attack the one on more images, then in float32, then that knows more, then the new one."""

    def worth(figure: Figure) -> tuple[int, bool, bool]:
        return figure["examples"], "precision" not in figure, "kept" in figure or "survived" in figure

    kept = {name: figure for name, figure in old.items() if name in new and worth(figure) > worth(new[name])}
    return {**old, **new, **kept}


def read_record(file: Path) -> Record | None:
    """The record in ``file``; None where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}")
        timing = content.pop("pace", {})  # what it was called in the first records
        record: Record = conform({"timing": timing, **content, "config": translate(content["config"])}, Record)
        return record
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} is no record that this version can read ({error}); move it away") from None


def read_records(folder: Path) -> dict[str, Record]:
    """All records in ``folder``, by name."""
    found = (read_record(file) for file in sorted(folder.glob("*.json")))
    return {record.name: record for record in found if record is not None}


def read_csv(file: Path, scale: Scale, rows: Iterable[Row]) -> dict[str, Record]:
    """The runs of ``scale`` in a CSV file, by name: one line for each set of weights of a run of one of ``rows``.

    Accuracies and shares are in percent. What is empty was not measured.
    """
    known, found = {row.name: row for row in rows}, dict[str, Record]()
    with file.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        if tuple(reader.fieldnames or ()) != CSV_COLUMNS:
            raise RunError(f"{file}: its columns have to be {','.join(CSV_COLUMNS)}")
        here = [line for line in reader if line["scale"] == scale.name]
    for line in here:
        if line["row"] not in known:
            raise RunError(f"{file}: no row {line['row']!r} at scale {scale.name}; there are {', '.join(known)}")
        config = known[line["row"]].config(scale).replace_section("training", seed=int(line["seed"]))
        name, epochs, seconds = run_name(config), int(line["epochs"]), float(line["seconds_per_epoch"] or 0)
        shares = {share: float(line[share] or 0) for share in SHARES}
        whole = sum(shares.values())
        about: dict[str, Any] = {"seconds": epochs * seconds, "epochs": epochs, "examples": 50_000.0 * epochs}
        # Where there are no shares, nothing is told apart.
        about["shares"] = {key: share / whole if whole else float(key == "boundary") for key, share in shares.items()}
        about |= {"work": float(line["passes"] or 0), "jobs": 1 if seconds else 2, "figures": {}}
        environment = {"device": line["device"], "commit": line["commit"]}
        record = found.setdefault(name, Record(name, config.to_dict(), environment, "finished", **about))
        images = {"autoattack": float(line["autoattack_images"] or 10_000)}
        figures = {a: _figure(float(line[a]) / 100, images.get(a, 10_000)) for a in CSV_ATTACKS if line[a]}
        (record.figures if line["weights"] == WEIGHTS else record.averaged).update(figures)
    return found


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
