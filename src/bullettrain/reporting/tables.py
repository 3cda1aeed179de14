"""The tables of a report: test accuracy, comparison, epochs, configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bullettrain.formatting import (
    DASH,
    MIN_CAPTURE_SECONDS,
    duration,
    error_in_words,
    number,
    percent,
    points,
    settings,
    short,
    times,
)
from bullettrain.reporting.run import Comparison, Run
from bullettrain.run_folder import SHARES

MAX_EPOCHS = 400
"""Maximum number of rows in the table of epochs."""


@dataclass(frozen=True)
class Grid:
    """A table of formatted cells."""

    head: list[str]
    rows: list[list[str]]
    note: str = ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> Grid:
    """Make a grid without its empty columns."""
    used = [i for i in range(len(head)) if any(row[i] != DASH for row in rows)]
    return Grid([head[i] for i in used], [[row[i] for i in used] for row in rows], note)


def evaluations(run: Run) -> Grid:
    """Return the test accuracies, with a row for each set of weights and a column for each attack."""
    attacks = list(dict.fromkeys(evaluation.attack for evaluation in run.evaluations))
    weights = list(dict.fromkeys(evaluation.weights for evaluation in run.evaluations))
    lines = [[name, *(percent(run.accuracy(name, attack), 2) for attack in attacks)] for name in weights]
    sizes = {evaluation.examples for evaluation in run.evaluations if math.isfinite(evaluation.examples)}
    note = f", on {number(sizes.pop(), 0)} test examples" if len(sizes) == 1 else ""
    for precision in sorted({e.precision for e in run.evaluations} - {"float32"}):
        note += f"; attacks searched in {precision}, evaluated in float32"
    return Grid(["Weights", *map(run.attack_name, attacks)], lines, note)


def compared(comparison: Comparison) -> Grid:
    """Return the figures of both runs and their difference, with a row for each figure."""
    both, speedup = (comparison.plain, comparison.mine), comparison.speedup
    lines = []
    for attack in comparison.attacks:
        change = points(comparison.gap(attack), 2, comparison.errors[attack])
        name = f"{comparison.bullettrain.attack_name(attack)} accuracy"
        lines.append([name, *(percent(row[attack], 2) for row in both), change])
    lines.append(["Passes an example", *(number(row["work"], 1) for row in both), times(speedup["work"])])
    lines.append(["Training time", *(duration(row["seconds"]) for row in both), times(speedup["wall_clock"])])
    captures = [row.get("capture_seconds", 0.0) for row in both]
    if sum(captures) > MIN_CAPTURE_SECONDS:
        lines.append(["Compiling and capturing", *map(duration, captures), DASH])
    note = f" Test accuracy of the {comparison.weights} weights." if comparison.weights else ""
    note += f" {error_in_words(comparison.paired)}." if comparison.errors else ""
    return Grid(["", "Baseline", "BulletTrain", "Change"], lines, note)


def epochs(run: Run) -> Grid:
    """Return the table of epochs, without empty columns."""
    at = f" ({run.threat})" if run.threat else ""
    whole, tenth, part = partial(number, digits=0), partial(number, digits=1), partial(percent, digits=0)
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "Epoch": ("epoch", whole),
        "Time": ("seconds", duration),
        "Examples/s": ("examples_per_second", whole),
        "Loss": ("loss", partial(number, digits=3)),
        "LR": ("lr", short),
        f"{run.seen_as.capitalize()}, training": ("clean_accuracy", percent),
        "Corrupted, training" if run.makes_views else f"Attacked{at}, training": ("robust_accuracy", percent),
        "Clean, validation": ("validation_clean", percent),
        "Corrupted, validation" if run.makes_views else f"PGD-10{at}, validation": ("validation_robust", percent),
        f"PGD-10{at}, a few training images": ("probe_robust", percent),
        **{name.capitalize(): (name, part) for name in SHARES if not run.plain},
        "Passes": ("work", tenth),
    }
    count = len(run.epochs["epoch"])
    first = max(0, count - MAX_EPOCHS)
    rows = [[show(float(run.epochs[name][i])) for name, show in columns.values()] for i in range(first, count)]
    return table(list(columns), rows, f"The first {first} are in metrics.jsonl." if first else "")


def configuration(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the configuration by section, first the settings outside of sections as ``run``."""
    sections = {name: value for name, value in run.config.items() if isinstance(value, Mapping)}
    others = {name: value for name, value in run.config.items() if name not in sections}
    named = {**({"run": others} if others else {}), **sections}
    return [(str(name), list(settings(section))) for name, section in named.items() if name != "environment"]
