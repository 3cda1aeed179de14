"""The section on `bullettrain evaluate`: accuracies with their intervals, curves, classes, corruptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError
from bullettrain.evaluation.results import Entry, Result
from bullettrain.evaluation.specs import radius, threat_in_words
from bullettrain.formatting import DASH, attack_name, duration, number, percent
from bullettrain.reporting.attack_rows import AttackRow, difference, mean_in_words, rows
from bullettrain.reporting.figures import Plate, plate
from bullettrain.reporting.plotting import Curve, end_labels, line, panels, percent_axis
from bullettrain.reporting.run import Run
from bullettrain.reporting.summary import Grid
from bullettrain.reporting.svg import COLOURS, drawing, inline
from bullettrain.run_folder import Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFIX = {"attack": "", "part": "… ", "worst": "All of these, "}
MOST_CLASSES = 12
"""More than these have no room in one figure: the weakest are shown."""


@dataclass(frozen=True)
class EvaluationSection:
    """One network on one dataset, ready to be shown."""

    title: str
    note: str
    warnings: list[str]
    table: Grid
    plates: list[Plate]
    corruptions: Grid | None


def evaluation_section(entry: Entry, config: Mapping[str, Any] | None, index: int) -> EvaluationSection:
    """``entry`` as tables and figures; ``index`` keeps the names of figures apart."""
    attacks = [result for result in entry.results if result.role == "attack"]
    corrupted = [result for result in attacks if result.corruptions]
    name = f"judged{index}"
    plates = [eps_curve(entry, name), steps_curve(entry, name), classes(entry, attacks, name)]
    return EvaluationSection(
        f"{entry.weights} weights on {entry.data}" if entry.recipe else f"{entry.model} on {entry.data}",
        _note(entry),
        entry.warnings,
        _table(entry, attacks, _config(config)),
        [plate for plate in plates if plate is not None],
        _corruptions(corrupted[0]) if corrupted else None,
    )


def strongest(entries: Sequence[Entry], run: Run) -> str:
    """A sentence where an attack left less of some weights than that which training ended with.

    Of the same threat, and on no fewer images.
    """
    method = run.section("method")
    own = {evaluation.weights: evaluation for evaluation in run.evaluations if evaluation.attack != "clean"}
    found = [
        (result.accuracy, attack_name(result.name), entry.weights)
        for entry in entries
        if (before := own.get(entry.weights)) is not None
        for result in entry.results
        if result.role == "attack"
        and result.threat == (method.get("norm"), method.get("eps"))
        and result.examples >= before.examples
        and result.accuracy < before.accuracy
    ]
    if not found:
        return ""
    left, name, weights = min(found)
    return f" {name} ({run.threat}) leaves {percent(left)} ({weights} weights)."


def _note(entry: Entry) -> str:
    devices = str(entry.environment.get("device") or "")
    return f"{number(entry.examples, 0)} test images" + (f", {devices}" if devices else "")


def _config(values: Mapping[str, Any] | None) -> Config | None:
    try:
        return None if values is None else Config.from_dict(values)
    except ConfigError:
        return None  # a run of another version: the paper's figures are left out


def _table(entry: Entry, attacks: Sequence[Result], config: Config | None) -> Grid:
    """A row for each attack, those of AutoAttack below it, and the worst case over all on one threat."""
    found = rows(entry, attacks, config)
    columns: dict[str, Callable[[AttackRow], str]] = {
        "Attack": lambda row: f"{PREFIX[row.kind]}{row.name}",
        "Threat": lambda row: row.threat or DASH,
        "Accuracy": lambda row: percent(row.accuracy, 2),
        "95 % interval": lambda row: _interval(row.interval) if row.interval else DASH,
        "Precision": lambda row: row.precision,
        "Paper": lambda row: percent(row.paper, 2) if row.paper is not None else DASH,
        "Time": lambda row: duration(row.seconds) if row.seconds is not None else DASH,
    }
    if {row.precision for row in found} == {"float32"}:
        del columns["Precision"]
    if all(row.paper is None for row in found):
        del columns["Paper"]
    note = difference(attacks)
    return Grid(list(columns), [[text(row) for text in columns.values()] for row in found], f"{note}." if note else "")


def _interval(ends: Sequence[float]) -> str:
    return f"{100 * ends[0]:.2f} – {100 * ends[1]:.2f}"


def eps_curve(entry: Entry, name: str) -> Plate | None:
    """Accuracy against ε, with as many steps each."""
    swept = _swept(entry, "steps")
    clean = [r for r in entry.results if r.role == "curve" and r.attack["attack"] == "clean"]
    if not swept or not clean:
        return None
    largest = max(result.attack["eps"] for result in swept)
    bounded = [result for result in swept if result.attack["eps"] < largest]
    eps = np.array([0.0, *(result.attack["eps"] for result in bounded)])
    at = [result.attack["eps"] for result in _swept(entry, "eps")[:1]]
    xlabel = f"ε  ({'L∞' if swept[0].attack['norm'] == 'linf' else 'L2'})"
    label = "Line chart of accuracy against the radius of the attack."
    steps, free = swept[0].attack["steps"], next(r for r in swept if r.attack["eps"] == largest)
    caption = (
        f"PGD-{steps} on {number(swept[0].examples, 0)} images; the band is the 95 % interval, the dashed "
        f"line the ε of the attacks above. It should fall all the way: without bounds (ε = {radius(largest)}) "
        f"{percent(free.accuracy)} are left."
    )
    draw = partial(_curve, [clean[0], *bounded], eps, xlabel, mark=at)
    return plate(draw, f"{name}-eps", "Robust accuracy against ε", caption, label)


def steps_curve(entry: Entry, name: str) -> Plate | None:
    """Accuracy against steps, at one ε."""
    swept = _swept(entry, "eps")
    if not swept:
        return None
    steps = np.array([float(result.attack["steps"]) for result in swept])
    label = "Line chart of robust accuracy against the steps of the attack."
    draw = partial(_curve, swept, steps, "attack steps", log=True)
    caption = (
        f"PGD at {threat_in_words(*(swept[0].threat or ('linf', 0.0)))}, the same "
        f"{number(swept[0].examples, 0)} images. It should fall and level off; a rise is a sign of masked gradients."
    )
    return plate(draw, f"{name}-steps", "Robust accuracy against steps", caption, label)


def _swept(entry: Entry, held: str) -> list[Result]:
    """The points of a curve: those PGD results that agree on ``held``, where most do, ordered by the other."""
    other = "eps" if held == "steps" else "steps"
    points = [r for r in entry.results if r.role == "curve" and r.attack["attack"] == "pgd"]
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in points:
        key = (result.precision, result.examples, result.attack["norm"], result.attack[held])
        groups.setdefault(key, []).append(result)
    largest = max(groups.values(), key=len, default=[])
    return sorted(largest, key=lambda result: float(result.attack[other])) if len(largest) > 2 else []


def _curve(
    results: Sequence[Result], x: Floats, xlabel: str, *, log: bool = False, mark: Sequence[float] = ()
) -> Figure:
    """One line with its interval; a dashed line across at each of ``mark``."""
    y = np.array([result.accuracy for result in results])
    low, high = (np.array([result.interval[end] for result in results]) for end in (0, 1))
    figure, (axes,) = panels(1)
    for place in mark:
        axes.axvline(place, color=COLOURS["soft"], linewidth=0.9, linestyle=(0, (3, 3)))
    axes.fill_between(x, low, high, color=COLOURS["accent"], alpha=0.16, linewidth=0)
    line(axes, Curve(x, y, "accent"))
    line(axes, Curve(x, y, "accent", style="o"))
    if log:
        axes.set_xscale("log")
        axes.set_xticks(list(x), [f"{value:.0f}" for value in x])
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
    axes.set(xlabel=xlabel)
    percent_axis(axes)
    end_labels(axes, [(float(y[-1]), f"{100 * y[-1]:.1f} %", "accent-ink")])
    return figure


def classes(entry: Entry, attacks: Sequence[Result], name: str) -> Plate | None:
    """Accuracy of each class, clean and under the attack that breaks most."""
    clean = next((r for r in attacks if r.attack["attack"] == "clean" and r.per_class), None)
    attacked = [r for r in attacks if r.threat and r.per_class]
    if clean is None or not attacked:
        return None
    worst = min(attacked, key=lambda result: result.accuracy)
    shown = [i for i, share in enumerate(worst.per_class) if share is not None]
    cut = len(shown) > MOST_CLASSES
    if cut:
        shown = sorted(shown, key=lambda i: worst.per_class[i] or 0.0)[:MOST_CLASSES]
    names = [entry.classes[i] if len(entry.classes[i]) <= 12 else f"{entry.classes[i][:11]}…" for i in shown]
    places = np.arange(len(shown))[::-1]
    with drawing():
        figure, (axes,) = panels(1)
        axes.grid(visible=False)
        for result, colour, height in ((clean, "soft", 0.82), (worst, "accent", 0.82)):
            values = [result.per_class[i] or 0.0 for i in shown]
            axes.barh(places, values, height=height, color=COLOURS[colour], alpha=0.28 if result is clean else 0.9)
        for place, i in zip(places, shown, strict=True):
            text = f"{100 * (worst.per_class[i] or 0.0):.0f} / {100 * (clean.per_class[i] or 0.0):.0f}"
            axes.text(1.02, place, text, va="center", ha="left", fontsize=9.5, color=COLOURS["soft"], clip_on=False)
        axes.set_yticks(list(places), names)
        axes.set(xlim=(0, 1))
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        svg = inline(figure, f"{name}-classes", "Bars of the accuracy of each class, clean and under attack.")
    which = f"The {MOST_CLASSES} weakest of {len(entry.classes)} classes" if cut else "Each class"
    caption = (
        f"{which}: dark is under {attack_name(worst.name)} ({threat_in_words(*(worst.threat or ('linf', 0.0)))}), "
        "pale is clean; the numbers are both, in percent."
    )
    return Plate(f"{name}-classes", "Accuracy by class", caption, svg)


def _corruptions(result: Result) -> Grid:
    """Accuracy by corruption and severity."""
    about = result.corruptions
    lines = [
        [name.replace("_", " "), *(f"{100 * value:.1f}" for value in (sum(values) / len(values), *values))]
        for name, values in about["accuracy"].items()
    ]
    note = f"In percent; {mean_in_words(result)}."
    return Grid(["Corruption", "Mean", *(f"Severity {s}" for s in range(1, 6))], lines, note)
