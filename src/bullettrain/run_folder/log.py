"""What a run has recorded, in memory: tables of its steps and epochs, figures, warnings, example images.

Nothing here trusts the folder: a log cut off in the middle of a line, a resumed run that logged some steps twice,
keys that are missing or not numbers, all give what can be had. Only a folder that is no run at all is refused.
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

    def pack(self) -> bytes:
        """As the file that :meth:`RunLog.read` reads."""
        with extra("a checkpoint"):
            from safetensors.numpy import save
        packed: bytes = save(
            {name: np.ascontiguousarray(getattr(self, name)) for name in IMAGES},
            metadata={"classes": json.dumps(self.classes)},
        )
        return packed


IMAGES = ("clean", "adversarial", "category", "label", "clean_prediction", "adversarial_prediction")
"""The arrays of :class:`Samples`."""


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
    def read(cls: type[Log], folder: Path) -> Log:
        """Read a run's folder.

        Raises:
            RunError: the folder is not a run's.
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
        # What comes after an end is of a run that was resumed: it has not ended.
        ends = [record for record in records if record.get("kind") in ("step", "epoch", "end")][-1:]
        end = ends[0] if ends and ends[0]["kind"] == "end" else None
        return cls(
            folder=folder,
            config=config,
            steps=_table(kinds["step"], "step", STEP_COLUMNS),
            epochs=_table(kinds["epoch"], "epoch", EPOCH_COLUMNS),
            batch=next(batches, None),
            evaluations=list({(found.weights, found.attack): found for found in evaluations}.values()),
            warnings=[(_float(record.get("step")), str(record.get("message", ""))) for record in kinds["warning"]],
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
        found = (e.accuracy for e in self.evaluations if (e.weights, e.attack) == (weights, attack))
        return next(found, math.nan)

    def average(self, name: str) -> float:
        """A figure of the whole run: as the ``end`` record has it, else the mean of the epochs or steps so far."""
        if math.isfinite(self.totals.get(name, math.nan)):
            return self.totals[name]
        values = self.epochs[name] if np.isfinite(self.epochs[name]).any() else self.steps[name]
        return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan

    @property
    def seconds(self) -> float:
        """Training time, so far where the run has not ended."""
        if math.isfinite(self.totals["seconds"]):
            return self.totals["seconds"]
        logged = self.epochs["seconds"]
        return float(np.nansum(logged)) if np.isfinite(logged).any() else math.nan

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


def _read_evaluation(record: Mapping[str, Any]) -> Evaluation:
    usual = {"weights": "last", "attack": "clean", "precision": "float32", "fingerprint": "", "survived": ""}
    weights, attack, *about = (str(record.get(name, value)) for name, value in usual.items())
    return Evaluation(weights, attack, _float(record.get("accuracy")), _float(record.get("examples")), *about)


def _float(value: Any) -> float:
    """A finite number as a float; NaN for everything else, infinity too: no figure can show it."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if number else math.nan


def _table(records: Iterable[Mapping[str, Any]], key: str, columns: Iterable[str]) -> Table:
    """Columns of the records, by ``key``; what a killed run had logged beyond its checkpoint goes, and comes again."""
    kept: list[Mapping[str, Any]] = []
    for record in records:
        at = _float(record.get(key))
        if math.isnan(at) or math.isnan(_float(record.get("epoch"))):
            continue  # it has no place on any axis
        while kept and kept[-1][key] >= at:
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
