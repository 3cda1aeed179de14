"""What a run has recorded, in memory: tables of its steps and epochs, figures, warnings, example images.

Nothing here trusts the folder: a log cut off in the middle of a line, a resumed run that logged some steps twice,
keys that are missing or not numbers, all give what can be had. Only a folder that is no run at all is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bullettrain.extras import extra
from bullettrain.mining import Category
from bullettrain.run_folder.folder import CONFIG, RunFolder
from bullettrain.run_folder.weights import RunError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Table = dict[str, Floats]
"""Columns of equal length; NaN where nothing was logged."""

SHARES = tuple(category.name.lower() for category in Category)
TRAINING = ("step", "epoch", "loss", "lr", "robust_fraction", *SHARES, "work", "clean_accuracy", "robust_accuracy")
STEP_COLUMNS = (*TRAINING, *(f"svar_{name}" for name in SHARES))
EPOCH_COLUMNS = (*TRAINING, "seconds", "examples_per_second", "validation_clean", "validation_robust", "probe_robust")
END_KEYS = ("seconds", "capture_seconds", "epochs", "examples", *SHARES)
END_KEYS += ("work", "plain_work", "theoretical_speedup", "work_speedup")


@dataclass(frozen=True)
class ScoredBatch:
    """One mini-batch as it was separated: the score, the steps and the category of each of its m examples."""

    epoch: float
    svar: Floats
    steps: Ints
    category: Ints


@dataclass(frozen=True)
class Evaluation:
    """One accuracy on the test set, of one set of weights against one attack."""

    weights: str
    attack: str
    accuracy: float
    examples: float
    precision: str = "float32"
    """What the attack searched in."""
    fingerprint: str = ""
    """Of the images."""
    survived: str = ""
    """Which of them, a bit each; empty where it was not kept."""


@dataclass(frozen=True)
class Samples:
    """Example images (n, C, H, W) before and after the attack, and what the network made of them."""

    clean: NDArray[np.uint8]
    adversarial: NDArray[np.uint8]
    category: Ints
    label: Ints
    clean_prediction: Ints
    adversarial_prediction: Ints
    classes: list[str]


@dataclass(frozen=True)
class RunLog:
    """Everything that a run has recorded."""

    folder: Path
    config: Mapping[str, Any]
    """As it was written, with the names of this version; not checked."""
    steps: Table
    epochs: Table
    """One row an epoch; ``seconds`` are those of the epoch itself."""
    batch: ScoredBatch | None
    evaluations: list[Evaluation]
    warnings: list[tuple[float, str]]
    ended: str | None
    """Why the run ended; None while it goes on, or where it was killed."""
    totals: dict[str, float]
    """The figures of the ``end`` record; NaN where there is none."""
    samples: Samples | None
    recorded: bool
    """Whether its log has a record that can be read."""
    notes: list[str]
    """What the run could not have on its device, and what of the folder could not be read."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a run's folder.

        Raises:
            RunError: the folder is not a run's.
        """
        config = _read_config(folder)
        records, broken = RunFolder(folder).read_metrics()
        notes = [f"Lines of metrics.jsonl that could not be read and were left out: {broken}."] if broken else []
        steps: list[Mapping[str, Any]] = []
        epochs: list[Mapping[str, Any]] = []
        evaluations: dict[tuple[str, str], Evaluation] = {}
        warnings: list[tuple[float, str]] = []
        batch: ScoredBatch | None = None
        end: Mapping[str, Any] | None = None
        for record in records:
            match record.get("kind"):
                case "step":
                    _append(steps, record, "step")
                    end = None  # training went on after that end: it was resumed
                case "epoch":
                    _append(epochs, record, "epoch")
                    end = None
                case "batch":
                    batch = read_batch(record) or batch
                case "evaluation":
                    evaluation = _read_evaluation(record)
                    evaluations[evaluation.weights, evaluation.attack] = evaluation
                case "warning":
                    warnings.append((_float(record.get("step")), str(record.get("message", ""))))
                case "note":
                    notes.append(str(record.get("message", "")))
                case "end":
                    end = record
        samples = _read_samples(folder / "samples.safetensors", notes)
        return cls(
            folder=folder,
            config=config,
            steps=_table(steps, STEP_COLUMNS),
            epochs=_table(epochs, EPOCH_COLUMNS),
            batch=batch,
            evaluations=list(evaluations.values()),
            warnings=warnings,
            ended=None if end is None else str(end.get("reason", "finished")),
            totals={key: _float((end or {}).get(key)) for key in END_KEYS},
            samples=samples,
            recorded=any(record.get("kind") for record in records),
            notes=list(dict.fromkeys(notes)),
        )

    def section(self, name: str) -> Mapping[str, Any]:
        """A mapping of the configuration, empty where it is not there."""
        value = self.config.get(name)
        return value if isinstance(value, Mapping) else {}

    def accuracy(self, weights: str, attack: str) -> float:
        """Test accuracy, NaN where it was not evaluated."""
        found = [e.accuracy for e in self.evaluations if (e.weights, e.attack) == (weights, attack)]
        return found[-1] if found else math.nan

    def average(self, name: str) -> float:
        """A figure of the whole run: as the ``end`` record has it, else the mean of the epochs or steps so far."""
        if math.isfinite(self.totals.get(name, math.nan)):
            return self.totals[name]
        for table in (self.epochs, self.steps):
            values = table[name][np.isfinite(table[name])]
            if len(values):
                return float(values.mean())
        return math.nan

    @property
    def seconds(self) -> float:
        """Training time, so far where the run has not ended."""
        if math.isfinite(self.totals["seconds"]):
            return self.totals["seconds"]
        logged = self.epochs["seconds"][np.isfinite(self.epochs["seconds"])]
        return float(logged.sum()) if len(logged) else math.nan

    @property
    def capture_seconds(self) -> float:
        """Spent on compiling and capturing, which training time is without; known when the run ends."""
        return self.totals["capture_seconds"] if math.isfinite(self.totals["capture_seconds"]) else 0.0


def read_batch(record: Mapping[str, Any]) -> ScoredBatch | None:
    """The batch of a record, or None where its three lists do not fit together."""
    try:
        svar = np.array([math.nan if value is None else value for value in record["svar"]], dtype=np.float64)
        steps, category = (np.array(record[name], dtype=np.int64) for name in ("steps", "category"))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if not (svar.ndim == 1 and len(svar) and svar.shape == steps.shape == category.shape and np.isfinite(svar).all()):
        return None
    return ScoredBatch(_float(record.get("epoch")), svar, steps, category)


def _read_config(folder: Path) -> Mapping[str, Any]:
    if not (folder / CONFIG).is_file():
        inside = [name for name in ("bullettrain", "baseline") if (folder / name / CONFIG).is_file()]
        hint = f"; there is one in {folder / inside[0]}" if inside else ""
        raise RunError(f"{folder} is not a run: it has no {CONFIG}{hint}")
    config = RunFolder(folder).read_config()
    if not isinstance(config.get("method"), Mapping):
        raise RunError(f"{folder} is not a run: its {CONFIG} has no section 'method'")
    return config


def _read_evaluation(record: Mapping[str, Any]) -> Evaluation:
    usual = {"precision": "float32", "fingerprint": "", "survived": ""}
    about = [str(record.get(name, value)) for name, value in usual.items()]
    key = (str(record.get("weights", "last")), str(record.get("attack", "clean")))
    return Evaluation(*key, _float(record.get("accuracy")), _float(record.get("examples")), *about)


def _append(kept: list[Mapping[str, Any]], record: Mapping[str, Any], key: str) -> None:
    """Add a record; what a killed run had logged beyond the checkpoint it was resumed from goes."""
    at = _float(record.get(key))
    if not (math.isfinite(at) and math.isfinite(_float(record.get("epoch")))):
        return  # it has no place on any axis
    while kept and _float(kept[-1].get(key)) >= at:
        kept.pop()
    kept.append(record)


def _float(value: Any) -> float:
    """A finite number as a float; NaN for everything else, infinity too: no figure can show it."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if number else math.nan


def _table(records: list[Mapping[str, Any]], columns: Iterable[str]) -> Table:
    return {name: np.array([_float(record.get(name)) for record in records], dtype=np.float64) for name in columns}


def _read_samples(path: Path, notes: list[str]) -> Samples | None:
    if not path.is_file():
        return None
    with extra("a report"):
        from safetensors import SafetensorError, safe_open
    integers = ("category", "label", "clean_prediction", "adversarial_prediction")
    try:
        with safe_open(path, framework="numpy") as file:
            clean, adversarial = (np.asarray(file.get_tensor(name)) for name in ("clean", "adversarial"))
            category, label, *predictions = (np.asarray(file.get_tensor(name)).astype(np.int64) for name in integers)
            classes = json.loads((file.metadata() or {}).get("classes", "[]"))
        if clean.shape != adversarial.shape or clean.ndim != 4 or clean.dtype != np.uint8:
            raise ValueError("shapes")
        if {len(column) for column in (category, label, *predictions)} != {len(clean)}:
            raise ValueError("lengths")
        before, after = predictions
        return Samples(clean, adversarial, category, label, before, after, [str(name) for name in classes])
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        notes.append(f"samples.safetensors could not be read ({type(error).__name__}): no example images are shown.")
        return None
