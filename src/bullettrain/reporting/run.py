"""Read what a report shows: a run, a comparison of two runs, or an evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bullettrain.checkpoint_paths import check_run, rather
from bullettrain.errors import UserError, raised_as
from bullettrain.evaluation.results import FILE as EVALUATIONS
from bullettrain.evaluation.results import Entry, Store
from bullettrain.evaluation.specs import threat_in_words
from bullettrain.formatting import attack_name
from bullettrain.loading import load_model
from bullettrain.run_folder import SHARES, RunError, RunLog, Table

COMPARISON = "comparison.json"
SHORT_SECONDS = 60.0
"""Training times below this are too noisy to compare."""


@dataclass(frozen=True)
class Run(RunLog):
    """A run's log, with its evaluations and what a report derives from its configuration."""

    entries: list[Entry] = field(default_factory=list)
    """Results of `bullettrain evaluate`."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the folder of a run. Evaluations that cannot be read, or are of earlier weights, become a note."""
        run = super().read(folder)
        try:
            entries = [entry for entry in Store(folder).entries if entry.results]
        except RunError:
            run.notes.append(f"{EVALUATIONS} could not be read: the evaluation is not shown.")
            return run
        present = {name: _digest(folder, name) for name in {entry.weights for entry in entries}}
        run.entries.extend(entry for entry in entries if present[entry.weights] in (None, entry.digest))
        for name in dict.fromkeys(entry.weights for entry in entries if entry not in run.entries):
            again = f"run bullettrain evaluate --weights {name} again"
            run.notes.append(f"{EVALUATIONS} is of earlier {name} weights than the present ones: {again}.")
        return run

    @property
    def budget(self) -> dict[str, int]:
        """Attack steps by category; empty if the allocation is not by category."""
        method, names = self.section("method"), SHARES if self.allocation == "categories" else ()
        return {name: method[name] for name in names if isinstance(method.get(name), int)}

    @property
    def mean_steps(self) -> float:
        """Mean attack steps of an example, of the last batch or by the counted work; NaN if they are by category."""
        method = self.section("method")
        if self.batch is not None and self.allocation != "categories":
            return float(self.batch.steps.mean())
        # The work also depends on the selection, and on examples without any step, which may need no update.
        idle = method.get("objective") != "pgd-at" and (not method.get("robust") or method.get("clean_warmup"))
        if self.allocation.startswith(("categories", "gaussian")) or idle or method.get("leave_out"):
            return math.nan
        # An attack step is two passes.
        return _number(method.get("boundary")) - (self.totals["plain_work"] - self.average("work")) / 2

    @property
    def allocation(self) -> str:
        """Name of the allocation, e.g. "categories" or "history, shuffled"."""
        method = self.section("method")
        return str(method.get("allocation", "categories")) + (", shuffled" if method.get("shuffled") else "")

    @property
    def plain(self) -> bool:
        """Whether examples are not categorized: all get the same steps, or the allocation does not use categories."""
        if self.allocation not in ("categories", "gaussian"):
            return True
        return len(self.budget) == len(SHARES) and len(set(self.budget.values())) == 1

    @property
    def makes_views(self) -> bool:
        """Whether the objective is AugMix, where a step is two views."""
        return self.section("method").get("objective") == "augmix"

    @property
    def threat(self) -> str:
        """Norm and ε of training, e.g. "L∞ 8/255"; empty for AugMix, or if unknown."""
        method = self.section("method")
        eps, norm = _number(method.get("eps")), method.get("norm", "linf")
        return "" if self.makes_views or not math.isfinite(eps) else threat_in_words(str(norm), eps)

    def attack_name(self, attack: str) -> str:
        """Format an attack with its threat: PGD-20 (L∞ 8/255)."""
        name = attack_name(attack)
        return name if attack in ("clean", "views") or not self.threat else f"{name} ({self.threat})"

    @property
    def seen_as(self) -> str:
        """How uncorrupted training images were shown to the network: clean, as views, or partly as views."""
        views = self.section("data").get("views")
        return "clean" if not views else "as views" if views == 1 else "partly as views"

    @property
    def progress(self) -> Table:
        """Training curve: one row per logged step, or per epoch if no step was logged."""
        return self.steps if len(self.steps["step"]) else self.epochs


class Numbers(dict[str, float]):
    """Numbers by name; a missing one is NaN."""

    def __missing__(self, name: str) -> float:
        return math.nan


@dataclass(frozen=True)
class Comparison:
    """Two runs of one recipe, with and without BulletTrain, and their figures."""

    bullettrain: Run
    baseline: Run
    mine: Numbers
    """Figures of BulletTrain: accuracy by attack, seconds, capture_seconds, shares, work."""
    plain: Numbers
    """The same figures of the baseline."""
    weights: str
    """Name of the weights that the accuracies are of; may be empty."""
    speedup: Numbers
    errors: Numbers
    """By attack: standard error of the difference of accuracies."""
    paired: bool
    """Whether ``errors`` are of differences that are paired by image."""

    @property
    def attacks(self) -> list[str]:
        """Attacks that the figures have an accuracy for."""
        others = {"seconds", "capture_seconds", "work", "weights", *SHARES}
        return [key for key in dict.fromkeys((*self.plain, *self.mine)) if key not in others]

    def gap(self, attack: str) -> float:
        """Return the accuracy of BulletTrain minus that of the baseline."""
        return self.mine[attack] - self.plain[attack]

    @property
    def doubt(self) -> str:
        """Why the wall-clock speed-up is not reliable; empty if it is."""
        if self.plain["seconds"] < SHORT_SECONDS:
            return "noisy, since training took less than a minute"
        on_cpu = str(self.baseline.section("environment").get("device")).endswith("CPU")
        return "on a CPU, which says little about a GPU" if on_cpu else ""


@dataclass(frozen=True)
class Contents:
    """Contents of a folder that a report is made of."""

    folder: Path
    runs: list[Run]
    """The run, or of a comparison the BulletTrain run and the baseline."""
    entries: list[Entry]
    """Evaluations of a network that is not a run."""
    comparison: Comparison | None = None


def read_contents(folder: Path) -> Contents:
    """Read the folder of a run, a comparison or an evaluation.

    Raises:
        RunError: the folder is not one of them.
    """
    folder = Path(folder)
    if folder.is_file():
        raise RunError(f"{folder} is no folder; {rather(folder, 'give the folder of a run')}")
    if (folder / COMPARISON).is_file():
        comparison = _read_comparison(folder)
        return Contents(folder, [comparison.bullettrain, comparison.baseline], [], comparison)
    if (folder / "config.yaml").is_file() or not (folder / EVALUATIONS).is_file():
        check_run(folder, "the folder of a run, a comparison or an evaluation")
        return Contents(folder, [Run.read(folder)], [])
    return Contents(folder, [], [entry for entry in Store(folder).entries if entry.results])


def _digest(folder: Path, weights: str) -> str | None:
    """Return the digest of a run's network; None if it cannot be loaded here, e.g. for want of trust."""
    try:
        return load_model(folder, weights).digest
    except UserError:
        return None


def _read_comparison(folder: Path) -> Comparison:
    """Read ``comparison.json`` and the two runs that it compares."""
    path = folder / COMPARISON
    unread = f"{path} is not a comparison that this version can read; run the comparison again"
    with raised_as(RunError, unread, OSError, ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = {str(row["name"]): dict(row) for row in content["rows"]}
        mine, plain = rows.get("bullettrain", {}), rows.get("baseline", {})
        speedup, details = dict(content.get("speedup", {})), dict(content.get("errors", {}))
        errors = {attack: detail.get("error") for attack, detail in details.items()}
        paired = all(detail.get("paired") is True for detail in details.values())
    runs = (Run.read(folder / "bullettrain"), Run.read(folder / "baseline"))
    figures = (_numbers(mine), _numbers(plain))
    return Comparison(*runs, *figures, str(mine.get("weights") or ""), _numbers(speedup), _numbers(errors), paired)


def _numbers(values: Mapping[str, Any]) -> Numbers:
    return Numbers({str(name): _number(value) for name, value in values.items() if name != "name"})


def _number(value: Any) -> float:
    """Convert a number to float; NaN for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
