"""The section of a report about `bullettrain evaluate`: tables of attacks and corruptions, and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError
from bullettrain.evaluation.results import Entry, Result
from bullettrain.evaluation.specs import radius
from bullettrain.formatting import DASH, attack_name, duration, number, percent
from bullettrain.reporting.attack_rows import AttackRow, difference, mean_in_words, rows, weakest
from bullettrain.reporting.plotting import COLOURS, DASHED, Curve, Plate, draw_lines, panels
from bullettrain.reporting.tables import Grid, table

MAX_CLASSES = 12
"""Maximum number of classes in a figure; the weakest are shown."""


def section(entry: Entry, values: Mapping[str, Any] | None, index: int) -> dict[str, Any]:
    """Return the values of the template for one network on one dataset.

    Args:
        entry: results.
        values: configuration of the run, if the network is of a run.
        index: makes the names of figures unique.
    """
    attacks = sorted((result for result in entry.results if result.role == "attack"), key=_order)
    device, notes = str(entry.environment.get("device") or ""), (difference(attacks), weakest(entry, attacks))
    plates = (over_eps(entry), over_steps(entry), by_class(entry, attacks))
    return {
        "title": f"{entry.weights} weights on {entry.data}" if entry.recipe else f"{entry.model} on {entry.data}",
        "note": f"{number(entry.examples, 0)} test images" + (f", {device}" if device else ""),
        "warnings": entry.warnings,
        "table": _attacks(rows(entry, attacks, _config(values))),
        "notes": [f"{note[0].upper()}{note[1:]}." for note in notes if note],
        "plates": [replace(plate, name=f"evaluated{index}-{plate.name}") for plate in plates if plate],
        "corruptions": next((_corruptions(result) for result in attacks if result.corruptions), None),
    }


def _order(result: Result) -> tuple[str, float]:
    """Return what the table is sorted by: results without a threat, then those of each norm by ε."""
    return result.threat or ("", 0.0)


def _config(values: Mapping[str, Any] | None) -> Config | None:
    try:
        return None if values is None else Config.from_dict(values)
    except ConfigError:
        return None  # a run of another version, without the paper's figures


def _attacks(rows: Sequence[AttackRow]) -> Grid:
    """Return the table of attacks. The worst case is shown if it is below all attacks."""
    lowest = min(row.accuracy for row in rows if row.kind != "worst")
    several = {row.precision for row in rows} != {"float32"}
    names = {"attack": "{}", "part": "\u2003{}", "worst": "worst case over these attacks"}
    cells = [
        [
            names[row.kind].format(row.name),
            row.threat or "none",
            percent(row.accuracy, 2),
            " – ".join(f"{100 * end:.2f}" for end in row.interval) if row.interval else DASH,
            row.precision if several else DASH,
            percent(row.paper, 2) if row.paper is not None else DASH,
            duration(row.seconds) if row.seconds is not None else DASH,
        ]
        for row in rows
        if row.kind != "worst" or row.accuracy < lowest
    ]
    return table(["Attack", "Threat", "Accuracy", "95 % interval", "Precision", "Paper", "Time"], cells)


def _corruptions(result: Result) -> Grid:
    """Return the table of corruptions, in percent."""
    heads = ["Corruption", "Mean", *(f"Severity {severity}" for severity in range(1, 6))]
    lines = [
        [name.replace("_", " "), *(f"{100 * value:.1f}" for value in (sum(values) / len(values), *values))]
        for name, values in result.corruptions["accuracy"].items()
    ]
    return Grid(heads, lines, f"In percent; {mean_in_words(result)}.")


# --------------------------------------------------------------------------------------------- figures


def over_eps(entry: Entry) -> Plate | None:
    """Plot accuracy against ε, with a fixed number of steps."""
    swept = _swept(entry, "eps")
    clean = [r for r in entry.results if r.role == "curve" and r.attack["attack"] == "clean"]
    if not swept or not clean:
        return None
    *bounded, free = swept
    xlabel = f"ε  ({free.threat_name.split()[0]})"
    plate = _sweep([clean[0], *bounded], [0.0, *(result.attack["eps"] for result in bounded)], xlabel)
    for result in _swept(entry, "steps")[:1]:
        plate.figure.axes[0].axvline(result.attack["eps"], **DASHED)
    attack = f"PGD-{free.attack['steps']} on {number(free.examples, 0)} images, with 95 % interval"
    limit = f"without bounds (ε = {radius(free.attack['eps'])}) {percent(free.accuracy)} are left"
    caption = f"{attack}; dashed: ε of the attacks above. It should fall to zero: {limit}."
    return replace(plate, name="eps", title="Robust accuracy against ε", caption=caption)


def over_steps(entry: Entry) -> Plate | None:
    """Plot accuracy against steps, at a fixed ε."""
    swept = _swept(entry, "steps")
    if not swept:
        return None
    plate = _sweep(swept, range(len(swept)), "attack steps")
    plate.figure.axes[0].set_xticks(range(len(swept)), [str(result.attack["steps"]) for result in swept])
    caption = f"PGD at {swept[0].threat_name}, the same images. A rise is a sign of masked gradients."
    return replace(plate, name="steps", title="Robust accuracy against steps", caption=caption)


def _swept(entry: Entry, over: str) -> list[Result]:
    """Return the points of the curve over "eps" or "steps", sorted; the other setting is held fixed."""
    held = "steps" if over == "eps" else "eps"
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in entry.results:
        if result.role == "curve" and result.attack["attack"] == "pgd":
            key = (result.precision, result.examples, result.attack["norm"], result.attack[held])
            groups.setdefault(key, []).append(result)
    largest = max(groups.values(), key=len, default=[])
    return sorted(largest, key=lambda result: float(result.attack[over])) if len(largest) > 2 else []


def _sweep(results: Sequence[Result], places: Sequence[float], xlabel: str) -> Plate:
    """Plot one line with its confidence interval."""
    x, y = np.array(places, dtype=np.float64), np.array([result.accuracy for result in results])
    figure, (axes,) = panels()
    low, high = np.array([result.interval for result in results]).T
    axes.fill_between(x, low, high, color=COLOURS["accent"], alpha=0.16, linewidth=0)
    draw_lines(axes, [Curve(x, y, "accent"), Curve(x, y, "accent", "{:.1f} %", "o")], percent=True)
    axes.set_xlabel(xlabel)
    return Plate("", "", "", figure)


def by_class(entry: Entry, attacks: Sequence[Result]) -> Plate | None:
    """Plot the accuracy of each class, clean and under the strongest attack."""
    clean = next((r for r in attacks if r.attack["attack"] == "clean" and r.per_class), None)
    attacked = [r for r in attacks if r.threat and r.per_class]
    if clean is None or not attacked:
        return None
    worst = min(attacked, key=lambda result: result.accuracy)
    known = {index: share for index, share in enumerate(worst.per_class) if share is not None}
    shown = sorted(sorted(known, key=lambda index: known[index])[:MAX_CLASSES])
    figure, (axes,) = panels()
    axes.grid(visible=False)
    for place, index in enumerate(shown):
        share, before = known[index], clean.per_class[index] or 0.0
        axes.barh(place, before, height=0.82, color=COLOURS["soft"], alpha=0.28)
        axes.barh(place, share, height=0.82, color=COLOURS["accent"], alpha=0.9)
        text = f"{100 * share:.0f} / {100 * before:.0f}"
        axes.text(1.02, place, text, va="center", ha="left", clip_on=False, fontsize=9.5, color=COLOURS["soft"])
    names = [entry.classes[index] for index in shown]
    axes.set_yticks(range(len(shown)), [name if len(name) <= 12 else f"{name[:11]}…" for name in names])
    axes.set(xlim=(0, 1), ylim=(len(shown) - 0.5, -0.5))
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    under = f"{attack_name(worst.name)} ({worst.threat_name})"
    cut = len(known) > MAX_CLASSES
    which = f"The {MAX_CLASSES} weakest of {len(entry.classes)} classes" if cut else "Each class"
    caption = f"{which}: green is under {under}, grey is clean; the numbers are both, in percent."
    return Plate("classes", "Accuracy by class", caption, figure)
