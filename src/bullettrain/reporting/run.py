"""A run's folder, read into memory: what was asked for, what was logged, what the examples looked like.

Nothing here trusts the folder: a log cut off in the middle of a line, a resumed run that logged some steps twice,
keys that are missing or not numbers, all give what can be had. Only a folder that is no run at all is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullettrain.evaluation.results import FILE as EVALUATIONS
from bullettrain.evaluation.results import Entry, Store
from bullettrain.evaluation.specs import threat_in_words
from bullettrain.extras import extra
from bullettrain.formatting import attack_name
from bullettrain.mining import Category
from bullettrain.run_folder import RunError, RunFolder

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
class Run:
    """Everything a report needs to know about one run."""

    folder: Path
    config: Mapping[str, Any]
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
    recorded: bool = True
    """Whether its log has a record that can be read."""
    notes: list[str] = field(default_factory=list)
    """What the run could not have on its device, and what of the folder could not be read."""

    def section(self, name: str) -> Mapping[str, Any]:
        """A mapping of the configuration, empty where it is not there."""
        value = self.config.get(name)
        return value if isinstance(value, Mapping) else {}

    @property
    def budget(self) -> dict[str, int]:
        """Attack steps by category, those that the configuration gives."""
        method = self.section("method")
        return {name: method[name] for name in SHARES if isinstance(method.get(name), int)}

    @property
    def plain(self) -> bool:
        """Whether every example gets the same steps: a baseline, where nothing is mined."""
        return len(self.budget) == len(SHARES) and len(set(self.budget.values())) == 1

    @property
    def makes_views(self) -> bool:
        """Whether examples are corrupted by AugMix, not attacked: a step is two views."""
        return self.section("method").get("objective") == "augmix"

    @property
    def threat(self) -> str:
        """Norm and ε that the run is trained and judged at, in words; empty for AugMix, or where it is not known."""
        method = self.section("method")
        eps, norm = _float(method.get("eps")), method.get("norm", "linf")
        return "" if self.makes_views or not math.isfinite(eps) else threat_in_words(str(norm), eps)

    def attack_name(self, attack: str) -> str:
        """An attack of this run in words, with its threat: PGD-20 (L∞ 8/255)."""
        named = attack_name(attack)
        return named if attack in ("clean", "views") or not self.threat else f"{named} ({self.threat})"

    @property
    def seen_as(self) -> str:
        """How the network saw training images that were not corrupted: clean, as views, or partly as views."""
        views = self.section("data").get("views")
        return "clean" if not views else "as views" if views == 1 else "partly as views"

    @property
    def progress(self) -> Table:
        """The training curve: the step records, or the epochs where no step was logged."""
        return self.steps if len(self.steps["step"]) else self.epochs

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

    def accuracy(self, weights: str, attack: str) -> float:
        """Test accuracy, NaN where it was not evaluated."""
        found = [e.accuracy for e in self.evaluations if (e.weights, e.attack) == (weights, attack)]
        return found[-1] if found else math.nan


@dataclass(frozen=True)
class Comparison:
    """Two runs of one recipe, with and without mining, and what came of it."""

    bullettrain: Run
    baseline: Run
    rows: dict[str, dict[str, float]]
    """By name: accuracy by attack, seconds, those of captures, shares, work."""
    weights: dict[str, str]
    """By name: which weights the row's accuracies are of, where it says."""
    speedup: dict[str, float]
    errors: dict[str, float]
    """By attack: standard error of the change of accuracy, where it was kept."""
    paired: bool
    """Whether errors are those of the same images, image by image."""

    @property
    def attacks(self) -> list[str]:
        """The columns of the rows that are accuracies."""
        others = {"seconds", "capture_seconds", "work", "weights", "name", *SHARES}
        return list(dict.fromkeys(key for row in self.rows.values() for key in row if key not in others))


def read_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        ValueError: the folder is not a run's.
    """
    config = _read_config(folder)
    notes: list[str] = []
    records, broken = RunFolder(folder).read_metrics()
    if broken:
        notes.append(f"Lines of metrics.jsonl that could not be read and were left out: {broken}.")
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
                key = (str(record.get("weights", "last")), str(record.get("attack", "clean")))
                accuracy, examples = _float(record.get("accuracy")), _float(record.get("examples"))
                usual = {"precision": "float32", "fingerprint": "", "survived": ""}
                about = [str(record.get(name, value)) for name, value in usual.items()]
                evaluations[key] = Evaluation(*key, accuracy, examples, *about)
            case "warning":
                warnings.append((_float(record.get("step")), str(record.get("message", ""))))
            case "note":
                notes.append(str(record.get("message", "")))
            case "end":
                end = record
                said = record.get("notes")  # all there is of runs from before
                notes += map(str, said if isinstance(said, list) else [])
    samples = _read_samples(folder / "samples.safetensors", notes)
    return Run(
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


def read_comparison(folder: Path) -> Comparison:
    """Read a folder with ``comparison.json`` and the two runs it compares.

    Raises:
        ValueError: it is not such a folder.
    """
    path = folder / "comparison.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = {str(row["name"]): {k: _float(v) for k, v in row.items() if k != "name"} for row in content["rows"]}
        weights = {str(row["name"]): str(row["weights"]) for row in content["rows"] if row.get("weights")}
        speedup = {str(name): _float(value) for name, value in content.get("speedup", {}).items()}
        errors = {str(attack): dict(about) for attack, about in content.get("errors", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a comparison that this version can read; run the comparison again") from error
    mined, plain = read_run(folder / "bullettrain"), read_run(folder / "baseline")
    apart = {attack: _float(about.get("error")) for attack, about in errors.items()}
    paired = all(about.get("paired") is True for about in errors.values())
    return Comparison(mined, plain, rows, weights, speedup, apart, paired)


def _read_config(folder: Path) -> Mapping[str, Any]:
    with extra("a report"):
        import yaml
    path = folder / "config.yaml"
    if not path.is_file():
        inside = [name for name in ("bullettrain", "baseline") if (folder / name / "config.yaml").is_file()]
        hint = f"; there is one in {folder / inside[0]}" if inside else ""
        raise ValueError(f"{folder} is not a run: it has no config.yaml{hint}")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as YAML") from error
    if not isinstance(config, Mapping) or not isinstance(config.get("method"), Mapping):
        raise ValueError(f"{folder} is not a run: its config.yaml has no section 'method'")
    return config


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


def _read_samples(path: Path, notes: list[str]) -> Samples | None:
    if not path.is_file():
        return None
    with extra("a report"):
        from safetensors import SafetensorError, safe_open
    integers = ("category", "label", "clean_prediction", "adversarial_prediction")
    try:
        with safe_open(path, framework="numpy") as file:
            clean, adversarial = (np.asarray(file.get_tensor(name)) for name in ("clean", "adversarial"))
            category, label, before, after = (np.asarray(file.get_tensor(name)).astype(np.int64) for name in integers)
            classes = json.loads((file.metadata() or {}).get("classes", "[]"))
        lengths = {len(column) for column in (clean, category, label, before, after)}
        if clean.shape != adversarial.shape or clean.ndim != 4 or clean.dtype != np.uint8 or len(lengths) != 1:
            raise ValueError("shapes")
        names = [str(name) for name in classes]
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        notes.append(f"samples.safetensors could not be read ({type(error).__name__}): no example images are shown.")
        return None
    return Samples(clean, adversarial, category, label, before, after, names)


@dataclass(frozen=True)
class Part:
    """A run, or a network that was trained elsewhere, and how it was judged."""

    run: Run | None
    entries: list[Entry]
    damaged: list[str]
    """A note where the judgement cannot be read."""


@dataclass(frozen=True)
class Contents:
    """What a folder holds that a page is made of, read once."""

    folder: Path
    parts: list[Part]
    """The first is what the page is about; of a comparison the baseline comes second."""
    comparison: Comparison | None


def read_contents(folder: Path) -> Contents:
    """Read the folder of a run, a comparison or an evaluation.

    Raises:
        ValueError: the folder is none of them.
    """
    folder = Path(folder)
    comparison, runs = None, []
    if (folder / "comparison.json").is_file():
        comparison = read_comparison(folder)
        runs = [comparison.bullettrain, comparison.baseline]
    elif (folder / "config.yaml").is_file() or not (folder / EVALUATIONS).is_file():
        runs = [read_run(folder)]
    parts = [Part(run, *_read_evaluations(run.folder)) for run in runs] or [Part(None, *_read_evaluations(folder))]
    return Contents(folder, parts, comparison)


def _read_evaluations(folder: Path) -> tuple[list[Entry], list[str]]:
    """What `evaluation.json` in ``folder`` holds, and a note where it cannot be read."""
    if not (folder / EVALUATIONS).is_file():
        return [], []
    try:
        return [entry for entry in Store(folder).entries if entry.results], []
    except RunError:
        return [], [f"{EVALUATIONS} could not be read: the evaluation is not shown."]
