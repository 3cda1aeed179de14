"""The records of a run in memory: tables of steps and epochs, results, warnings, example images.

The reader tolerates incomplete lines, repeated steps of resumed runs, and missing or wrong values. It raises only if
the folder is not a run.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bullettrain.extras import extra
from bullettrain.mining import Category
from bullettrain.run_folder.folder import CONFIG, RunFolder
from bullettrain.run_folder.weights import RunError

Log = TypeVar("Log", bound="RunLog")
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Table = dict[str, Floats]
"""Columns of equal length, NaN where nothing was recorded."""

SHARES = tuple(category.name.lower() for category in Category)
TRAINING = ("step", "epoch", "loss", "lr", "robust_fraction", *SHARES, "work", "clean_accuracy", "robust_accuracy")
STEP_COLUMNS = (*TRAINING, *(f"svar_{name}" for name in SHARES))
EPOCH_COLUMNS = (*TRAINING, "seconds", "examples_per_second", "validation_clean", "validation_robust", "probe_robust")
END_KEYS = ("seconds", "capture_seconds", "epochs", "examples", *SHARES)
END_KEYS += ("work", "plain_work", "theoretical_speedup", "work_speedup")


@dataclass(frozen=True)
class ScoredBatch:
    """Scores, steps and categories of a mini-batch, (m,) each."""

    epoch: float
    svar: Floats
    steps: Ints
    category: Ints


@dataclass(frozen=True)
class Evaluation:
    """Accuracy of one set of weights under one attack on the test set."""

    weights: str
    attack: str
    accuracy: float
    examples: float
    precision: str = "float32"
    """Precision of the attack's search."""
    fingerprint: str = ""
    """Fingerprint of the images."""
    survived: str = ""
    """Which images are still classified correctly, packed as bits; empty if unknown."""


@dataclass(frozen=True)
class Samples:
    """Example images (n, C, H, W) before and after the attack, with labels and predictions (n,)."""

    clean: NDArray[np.uint8]
    adversarial: NDArray[np.uint8]
    category: Ints
    label: Ints
    clean_prediction: Ints
    adversarial_prediction: Ints
    classes: list[str]

    def pack(self) -> bytes:
        """Return the bytes of a safetensors file, for :meth:`RunLog.read`."""
        with extra("a checkpoint"):
            from safetensors.numpy import save
        packed: bytes = save(
            {name: np.ascontiguousarray(getattr(self, name)) for name in IMAGES},
            metadata={"classes": json.dumps(self.classes)},
        )
        return packed


IMAGES = ("clean", "adversarial", "category", "label", "clean_prediction", "adversarial_prediction")
"""Names of the arrays in :class:`Samples`."""


@dataclass(frozen=True)
class RunLog:
    """All records of a run."""

    folder: Path
    config: Mapping[str, Any]
    """Content of config.yaml, not validated, with names of this version."""
    steps: Table
    epochs: Table
    """One row per epoch; ``seconds`` are of that epoch."""
    batch: ScoredBatch | None
    evaluations: list[Evaluation]
    warnings: list[tuple[float, str]]
    ended: str | None
    """Why the run ended; None if it has not, or was killed."""
    totals: dict[str, float]
    """Figures of the ``end`` record; NaN if there is none."""
    samples: Samples | None
    recorded: bool
    """Whether there is any readable record."""
    notes: list[str]
    """Features that were not available to the run, and parts of the folder that could not be read."""

    @classmethod
    def read(cls: type[Log], folder: Path) -> Log:
        """Read a run's folder.

        Raises:
            RunError: the folder is not a run.
        """
        config = RunFolder(folder).read_config()
        if not isinstance(config.get("method"), Mapping):
            raise RunError(f"{folder} is not a run: its {CONFIG} has no section 'method'")
        records, broken = RunFolder(folder).read_metrics()
        notes = [f"Lines of metrics.jsonl that could not be read and were left out: {broken}."] if broken else []
        kinds = defaultdict(list)
        for record in records:
            kinds[str(record.get("kind"))].append(record)
        batches = filter(None, map(read_batch, reversed(kinds["batch"])))
        evaluations = map(_read_evaluation, kinds["evaluation"])
        notes += [str(record.get("message", "")) for record in kinds["note"]]
        samples = _read_samples(folder / "samples.safetensors", notes)
        # Records after an end are of a resumed run, which has not ended.
        ends = [record for record in records if record.get("kind") in ("step", "epoch", "end")][-1:]
        end = ends[0] if ends and ends[0]["kind"] == "end" else None
        return cls(
            folder=folder,
            config=config,
            steps=_table(kinds["step"], "step", STEP_COLUMNS),
            epochs=_table(kinds["epoch"], "epoch", EPOCH_COLUMNS),
            batch=next(batches, None),
            evaluations=list({(e.weights, e.attack): e for e in evaluations}.values()),
            warnings=[(_float(record.get("step")), str(record.get("message", ""))) for record in kinds["warning"]],
            ended=None if end is None else str(end.get("reason", "finished")),
            totals={key: _float((end or {}).get(key)) for key in END_KEYS},
            samples=samples,
            recorded=any(record.get("kind") for record in records),
            notes=list(dict.fromkeys(notes)),
        )

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of the config, empty if it is missing."""
        value = self.config.get(name)
        return value if isinstance(value, Mapping) else {}

    def accuracy(self, weights: str, attack: str) -> float:
        """Return the test accuracy, NaN if it was not evaluated."""
        matches = (e.accuracy for e in self.evaluations if (e.weights, e.attack) == (weights, attack))
        return next(matches, math.nan)

    def average(self, name: str) -> float:
        """Return a figure of the whole run: from the ``end`` record, or else the mean over epochs or steps so far."""
        if math.isfinite(self.totals.get(name, math.nan)):
            return self.totals[name]
        values = self.epochs[name] if np.isfinite(self.epochs[name]).any() else self.steps[name]
        return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan

    @property
    def seconds(self) -> float:
        """Training time, of the epochs so far if the run has not ended."""
        if math.isfinite(self.totals["seconds"]):
            return self.totals["seconds"]
        logged = self.epochs["seconds"]
        return float(np.nansum(logged)) if np.isfinite(logged).any() else math.nan

    @property
    def capture_seconds(self) -> float:
        """Time of compilation and captures, which is not part of the training time; 0 before the run ends."""
        return self.totals["capture_seconds"] if math.isfinite(self.totals["capture_seconds"]) else 0.0


def read_batch(record: Mapping[str, Any]) -> ScoredBatch | None:
    """Return the batch of a record, or None if its lists are invalid."""
    try:
        svar = np.array([math.nan if value is None else value for value in record["svar"]], dtype=np.float64)
        steps, category = (np.array(record[name], dtype=np.int64) for name in ("steps", "category"))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if not (svar.ndim == 1 and len(svar) and svar.shape == steps.shape == category.shape and np.isfinite(svar).all()):
        return None
    return ScoredBatch(_float(record.get("epoch")), svar, steps, category)


def _read_evaluation(record: Mapping[str, Any]) -> Evaluation:
    defaults = {"weights": "last", "attack": "clean", "precision": "float32", "fingerprint": "", "survived": ""}
    texts = {name: str(record.get(name, value)) for name, value in defaults.items()}
    return Evaluation(**texts, accuracy=_float(record.get("accuracy")), examples=_float(record.get("examples")))


def _float(value: Any) -> float:
    """Return a finite number as a float, NaN for everything else."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if number else math.nan


def _table(records: Iterable[Mapping[str, Any]], key: str, columns: Iterable[str]) -> Table:
    """Return columns of the records in order of ``key``. Steps that a resumed run repeated replace the earlier ones."""
    kept: list[Mapping[str, Any]] = []
    for record in records:
        position = _float(record.get(key))
        if math.isnan(position) or math.isnan(_float(record.get("epoch"))):
            continue
        while kept and kept[-1][key] >= position:
            kept.pop()
        kept.append(record)
    return {name: np.array([_float(record.get(name)) for record in kept], dtype=np.float64) for name in columns}


def _read_samples(path: Path, notes: list[str]) -> Samples | None:
    if not path.is_file():
        return None
    with extra("a report"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="numpy") as file:
            clean, adversarial, *integers = (np.asarray(file.get_tensor(name)) for name in IMAGES)
            classes = [str(name) for name in json.loads((file.metadata() or {}).get("classes", "[]"))]
        if clean.shape != adversarial.shape or clean.ndim != 4 or clean.dtype != np.uint8:
            raise ValueError("shapes")
        if {column.shape for column in integers} != {clean.shape[:1]}:
            raise ValueError("lengths")
        category, label, before, after = (column.astype(np.int64) for column in integers)
        return Samples(clean, adversarial, category, label, before, after, classes)
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        notes.append(f"samples.safetensors could not be read ({type(error).__name__}): no example images are shown.")
        return None
