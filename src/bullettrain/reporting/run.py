"""A run as a report shows it: what it trained against, in words, and beside its baseline."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bullettrain.evaluation.results import FILE as EVALUATIONS
from bullettrain.evaluation.results import Entry, Store
from bullettrain.evaluation.specs import threat_in_words
from bullettrain.formatting import attack_name
from bullettrain.run_folder import SHARES, RunError, RunLog, Table


@dataclass(frozen=True)
class Run(RunLog):
    """Everything a report needs to know about one run."""

    @property
    def budget(self) -> dict[str, int]:
        """Attack steps by category, those that the configuration gives; none where something else decides on them."""
        method, known = self.section("method"), SHARES if self.allocation == "categories" else ()
        return {name: method[name] for name in known if isinstance(method.get(name), int)}

    @property
    def allocation(self) -> str:
        """What decides on steps."""
        method = self.section("method")
        return str(method.get("allocation", "categories")) + (", shuffled" if method.get("shuffled") else "")

    @property
    def plain(self) -> bool:
        """Whether no classes are told apart: a baseline, with the same steps for all, or steps by something else."""
        if self.allocation not in ("categories", "gaussian"):
            return True
        return len(self.budget) == len(SHARES) and len(set(self.budget.values())) == 1

    @property
    def makes_views(self) -> bool:
        """Whether examples are corrupted by AugMix, not attacked: a step is two views."""
        return self.section("method").get("objective") == "augmix"

    @property
    def threat(self) -> str:
        """Norm and ε that the run is trained and evaluated at, in words; empty for AugMix, or where it is not known."""
        method = self.section("method")
        eps, norm = _number(method.get("eps")), method.get("norm", "linf")
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


def read_comparison(folder: Path) -> Comparison:
    """Read a folder with ``comparison.json`` and the two runs it compares.

    Raises:
        RunError: it is not such a folder.
    """
    path = folder / "comparison.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = {str(row["name"]): {k: _number(v) for k, v in row.items() if k != "name"} for row in content["rows"]}
        weights = {str(row["name"]): str(row["weights"]) for row in content["rows"] if row.get("weights")}
        speedup = {str(name): _number(value) for name, value in content.get("speedup", {}).items()}
        errors = {str(attack): dict(about) for attack, about in content.get("errors", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is not a comparison that this version can read; run the comparison again") from error
    mined, plain = Run.read(folder / "bullettrain"), Run.read(folder / "baseline")
    apart = {attack: _number(about.get("error")) for attack, about in errors.items()}
    paired = all(about.get("paired") is True for about in errors.values())
    return Comparison(mined, plain, rows, weights, speedup, apart, paired)


@dataclass(frozen=True)
class Part:
    """A run, or a network that was trained elsewhere, and how it was evaluated."""

    run: Run | None
    entries: list[Entry]
    damaged: list[str]
    """A note where the evaluation cannot be read."""


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
        RunError: the folder is none of them.
    """
    folder = Path(folder)
    comparison, runs = None, []
    if (folder / "comparison.json").is_file():
        comparison = read_comparison(folder)
        runs = [comparison.bullettrain, comparison.baseline]
    elif (folder / "config.yaml").is_file() or not (folder / EVALUATIONS).is_file():
        runs = [Run.read(folder)]
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


def _number(value: Any) -> float:
    """A number as a float; NaN for everything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
