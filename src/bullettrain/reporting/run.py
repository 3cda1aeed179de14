"""A run as a report shows it: what it trained against, in words, and beside its baseline."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bullettrain.evaluation.results import FILE as EVALUATIONS
from bullettrain.evaluation.results import Entry, Store
from bullettrain.evaluation.specs import threat_in_words
from bullettrain.formatting import attack_name
from bullettrain.run_folder import SHARES, RunError, RunLog, Table

COMPARISON = "comparison.json"
SHORT_SECONDS = 60.0
"""Trainings that are shorter than this are not timed well enough to be compared."""


@dataclass(frozen=True)
class Run(RunLog):
    """Everything a report needs to know about one run."""

    entries: list[Entry] = field(default_factory=list)
    """How `bullettrain evaluate` found it."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a run's folder; an evaluation that cannot be read is noted."""
        run = super().read(folder)
        try:
            run.entries.extend(entry for entry in Store(folder).entries if entry.results)
        except RunError:
            run.notes.append(f"{EVALUATIONS} could not be read: the evaluation is not shown.")
        return run

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
    mine: dict[str, float]
    """Of BulletTrain: accuracy by attack, seconds, those of captures, shares, work."""
    plain: dict[str, float]
    """The same of the baseline."""
    weights: str
    """Which weights the accuracies are of, where it says."""
    speedup: dict[str, float]
    errors: dict[str, float]
    """By attack: standard error of the change of accuracy, where it was kept."""
    paired: bool
    """Whether errors are those of the same images, image by image."""

    @property
    def attacks(self) -> list[str]:
        """What of the figures is an accuracy."""
        others = {"seconds", "capture_seconds", "work", "weights", *SHARES}
        return [key for key in dict.fromkeys((*self.plain, *self.mine)) if key not in others]

    def gap(self, attack: str) -> float:
        """How much more accurate BulletTrain is than the baseline."""
        return self.mine.get(attack, math.nan) - self.plain.get(attack, math.nan)

    @property
    def doubt(self) -> str:
        """Why the clock says little here; empty where it does say something."""
        if self.plain.get("seconds", math.nan) < SHORT_SECONDS:
            return "noisy, since training took less than a minute"
        on_cpu = str(self.baseline.section("environment").get("device")).endswith("CPU")
        return "on a CPU, which says little about a GPU" if on_cpu else ""


@dataclass(frozen=True)
class Contents:
    """What a folder holds that a page is made of, read once."""

    folder: Path
    runs: list[Run]
    """The first is what the page is about; of a comparison the baseline comes second."""
    entries: list[Entry]
    """How a network that was trained elsewhere was evaluated."""
    comparison: Comparison | None = None


def read_contents(folder: Path) -> Contents:
    """Read the folder of a run, a comparison or an evaluation.

    Raises:
        RunError: the folder is none of them.
    """
    folder = Path(folder)
    if (folder / COMPARISON).is_file():
        comparison = _read_comparison(folder)
        return Contents(folder, [comparison.bullettrain, comparison.baseline], [], comparison)
    if (folder / "config.yaml").is_file() or not (folder / EVALUATIONS).is_file():
        return Contents(folder, [Run.read(folder)], [])
    return Contents(folder, [], [entry for entry in Store(folder).entries if entry.results])


def _read_comparison(folder: Path) -> Comparison:
    """Read ``comparison.json`` and the two runs that it compares."""
    path = folder / COMPARISON
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = {str(row["name"]): dict(row) for row in content["rows"]}
        mine, plain = rows.get("bullettrain", {}), rows.get("baseline", {})
        speedup, errors = dict(content.get("speedup", {})), dict(content.get("errors", {}))
        apart = {attack: about.get("error") for attack, about in errors.items()}
        paired = all(about.get("paired") is True for about in errors.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is not a comparison that this version can read; run the comparison again") from error
    runs = (Run.read(folder / "bullettrain"), Run.read(folder / "baseline"))
    figures = (_numbers(mine), _numbers(plain))
    return Comparison(*runs, *figures, str(mine.get("weights") or ""), _numbers(speedup), _numbers(apart), paired)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): _number(value) for name, value in values.items() if name != "name"}


def _number(value: Any) -> float:
    """A number as a float; NaN for everything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
