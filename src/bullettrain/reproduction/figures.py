"""The paper's figures from records, as files of their own: PNG and SVG that can stand in a paper.

Each function gives pictures, none where nothing is measured yet; they are drawn inside :func:`printed`.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bullettrain.corruptions.table import SEVERITIES
from bullettrain.mining import Category
from bullettrain.reporting import figures as report
from bullettrain.reporting.run import Floats
from bullettrain.reporting.svg import COLOURS, printed
from bullettrain.reproduction.canvas import NAMES, Picture, attack_of, canvas, legend
from bullettrain.reproduction.labels import Line, Word, label
from bullettrain.reproduction.paper_figures import ROLES, panel_rows
from bullettrain.reproduction.plane import plane
from bullettrain.reproduction.results import Results
from bullettrain.reproduction.study import Row
from bullettrain.training.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 300


def draw(results: Results) -> list[Picture]:
    """The study's pictures; to be called, and saved, inside :func:`printed`."""
    name = results.study.figure
    return DRAWN[name](results) if name is not None else []


def write(results: Results, folder: Path) -> list[tuple[str, str, str]]:
    """Save the study's pictures as PNG and SVG: (name of the files, caption, the SVG as a data address) of each."""
    saved = []
    with printed():
        for picture in draw(results):
            name = results.study.name + picture.suffix
            content = {}
            for kind in ("png", "svg"):
                buffer = io.BytesIO()
                # No date: the same figures give the same file.
                about = {"Date": None} if kind == "svg" else {"Software": None}
                picture.figure.savefig(buffer, format=kind, dpi=DPI, facecolor="white", metadata=about)
                content[kind] = buffer.getvalue()
                RunFolder(folder).write(f"{name}.{kind}", content[kind])
            address = "data:image/svg+xml;base64," + base64.b64encode(content["svg"]).decode("ascii")
            saved.append((name, picture.caption, address))
    return saved


# --------------------------------------------------------------------------------------- of single runs


def _runs(results: Results) -> list[tuple[Row, Any]]:
    """The rows that have been run, each with its first seed."""
    return [(row, results.runs[row.name][0]) for row in results.rows.values() if results.runs[row.name]]


def shares(results: Results) -> list[Picture]:
    """Shares of outlier, boundary and robust examples over epochs (fig. 3)."""
    drawn = [(row, report.draw_shares(record.as_run())) for row, record in _runs(results)]
    text = "Shares of outlier, boundary and robust examples over epochs"
    return [Picture(f"-{row.name}", f"{text}. {row.title}.", figure) for row, figure in drawn if figure is not None]


def svar(results: Results) -> list[Picture]:
    """Mean SVar of the classes over iterations (fig. 4)."""
    drawn = [(row, report.draw_svar(record.as_run(), "step")) for row, record in _runs(results)]
    text = "Mean signed prediction variance of outlier, boundary and robust examples over iterations"
    return [Picture(f"-{row.name}", f"{text}. {row.title}.", figure) for row, figure in drawn if figure is not None]


def allocation(results: Results) -> list[Picture]:
    """One mini-batch: its histogram of SVar with the steps above, and steps by rank (fig. 5)."""
    pictures = []
    for row, record in _runs(results):
        batch = record.as_run().batch
        if batch is None:
            continue
        m, moved = len(batch.svar), int(((batch.svar < 0) & (batch.category != Category.OUTLIER)).sum())
        text = f"A mini-batch by SVar, {m} examples of epoch {batch.epoch:.0f}; above, its steps"
        if moved:  # captured steps round sizes up, towards more care
            text += f"; {moved} that are misclassified were treated as robust, since sizes are rounded up"
        pictures += [
            Picture("-histogram", f"{text}. {row.title}.", report.draw_histogram(batch)),
            Picture("-rank", f"Its steps, by rank. {row.title}.", report.draw_allocation(batch)),
        ]
    return pictures


# ---------------------------------------------------------------------------------------- over a setting


def _sweep(results: Results, symbol: str, stem: str) -> list[Picture]:
    """Clean (dashed) and robust (solid) accuracy against the theoretical speed-up, a point a value of the setting."""
    found = [
        (name.removeprefix(stem), values)
        for name in results.rows
        if name.startswith(stem) and (values := results.values(name, ("theoretical", "clean", "pgd20"))) is not None
    ]
    if len(found) < 2:
        return []
    found.sort(key=lambda point: point[1][0].mean)
    figure, (axes,) = canvas()
    x = [speed.mean for _, (speed, *_) in found]
    dashed, dotted = (0, (4, 2)), (0, (1, 2))
    drawn: dict[str, Any] = {}
    words: list[Word] = []
    lines: list[Line] = []
    levels: list[float] = []
    for index, metric, style, colour in ((1, "clean", dashed, "soft"), (2, "pgd20", "-", "accent")):
        y = [values[index].mean for _, values in found]
        spread = [values[index].std or 0.0 for _, values in found]
        look: dict[str, Any] = {"linestyle": style, "color": COLOURS[colour], "marker": "o", "markersize": 4}
        by = "clean" if metric == "clean" else attack_of(results, metric)
        bars = spread if any(spread) else None
        drawn[f"TRADES + BT, {by}"] = axes.errorbar(x, y, bars, capsize=2, linewidth=1.5, **look)
        base = results.value("trades", metric)
        if base is not None:
            drawn[f"TRADES, {by}"] = axes.axhline(base.mean, color=COLOURS[colour], linewidth=0.8, linestyle=dotted)
            levels.append(base.mean)
        lines += pairwise(zip(x, y, strict=True))
        lines += [((at, mean - std), (at, mean + std)) for at, mean, std in zip(x, y, spread, strict=True)]
        texts = [f"{NAMES.get(symbol, symbol)} = {value}" for value, _ in found]
        words += [Word(*place, COLOURS["ink"]) for place in zip(x, y, texts, strict=True)]
    axes.set(xlabel="theoretical speed-up", ylabel="accuracy, %")
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.margins(x=0.08, y=0.2)
    legend(axes, drawn)
    left, right = axes.get_xlim()
    label(axes, words, [*lines, *(((left, level), (right, level)) for level in levels)])
    text = f"Accuracy against the theoretical speed-up over {symbol}, which stands at each point; dotted: TRADES"
    return [Picture("", f"{text}.", figure)]


def gamma(results: Results) -> list[Picture]:
    """Accuracy and speed-up over γ."""
    return _sweep(results, "γ", "gamma-")


def robust_steps(results: Results) -> list[Picture]:
    """Accuracy and speed-up over N_R."""
    return _sweep(results, "N_R", "nr-")


def oracle(results: Results) -> list[Picture]:
    """The MNIST study: robust accuracy over step counts, one of three at zero in each panel (fig. 2)."""
    grid = results.scale.grid
    maps = {}
    for zero in ROLES:
        values = [results.value(row.name, "pgd100x20") for row in panel_rows(results.scale, zero)]
        means = [np.nan if value is None else value.mean for value in values]
        maps[zero] = np.array(means).reshape(len(grid), len(grid))
    if not any(np.isfinite(cells).any() for cells in maps.values()):
        return []
    figure, panels = canvas(2.0, 0.95, columns=3)
    for axes, (zero, cells) in zip(panels, maps.items(), strict=True):
        first, second = (NAMES[role] for role in ROLES if role != zero)
        image = axes.imshow(cells, origin="lower", cmap="viridis", vmin=0, vmax=100)
        axes.set(title=f"{NAMES[zero]} = 0", xlabel=second, ylabel=first)
        for setter in (axes.set_xticks, axes.set_yticks):
            setter(range(len(grid)), [str(count) for count in grid])
        axes.grid(visible=False)
        for (row, column), value in np.ndenumerate(cells):
            text = f"{value:.1f}" if np.isfinite(value) else "–"
            dark = np.isfinite(value) and value < 50
            axes.text(
                column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else COLOURS["ink"]
            )
    bar = figure.colorbar(image, ax=panels, shrink=0.85, pad=0.02)
    bar.set_label(f"{attack_of(results, 'pgd100x20')} accuracy, %")
    bar.outline.set_visible(False)
    base = results.value("baseline", "pgd100x20")
    said = f"; the baseline, seven steps for all, has {base.mean:.1f} %" if base is not None else ""
    return [Picture("", f"Robust accuracy with no steps for one class{said}.", figure)]


def ranks(results: Results) -> list[Picture]:
    """How well each score orders examples, beside the accuracy that it trains to; nothing where one alone has both."""
    found = [
        (row.title.rpartition(" by ")[2], [value.mean for value in values])
        for row in results.rows.values()
        if not row.plain and (values := results.values(row.name, ("rank", "rank_correct", "pgd20"))) is not None
    ]
    if len(found) < 2:
        return []
    figure, (left, right) = canvas(1.5, 0.9, columns=2)
    at = np.arange(len(found))[::-1]
    drawn = {
        "all": left.barh(at + 0.18, [means[0] for _, means in found], 0.32, color=COLOURS["robust"]),
        "correct only": left.barh(at - 0.18, [means[1] for _, means in found], 0.32, color=COLOURS["boundary"]),
    }
    left.set_yticks(at, [name for name, _ in found])
    left.axvline(0, color=COLOURS["soft"], linewidth=0.8)
    left.set(xlabel="rank correlation with the oracle")
    legend(left, drawn)
    right.barh(at, [means[2] for _, means in found], 0.5, color=COLOURS["accent"])
    right.set_yticks(at, [""] * len(found))
    for place, (_, (*_, accuracy)) in zip(at, found, strict=True):
        right.annotate(f"{accuracy:.1f}", (accuracy, place), xytext=(3, 0), textcoords="offset points", va="center")
    right.set(xlabel=f"{attack_of(results, 'pgd20')} accuracy, %")
    right.margins(x=0.16)
    _upright(left, right)
    return [Picture("", "Scores in the place of SVar: order of examples, and accuracy that comes of it.", figure)]


def corrupted(results: Results) -> list[Picture]:
    """Accuracy by corruption, and by severity, of each baseline and of what is compared with it."""
    pictures = []
    for base in (row for row in results.rows.values() if row.plain):
        rows = [row.name for row in results.rows.values() if base.name in (row.name, row.baseline)]
        group = {name: found for name in rows if (found := _by_corruption(results, name))}
        first = group.get(base.name, {})
        names = [name for name in first if all(name in found for found in group.values())]
        if names and len(group) > 1:
            names.sort(key=lambda name: float(np.mean(first[name])))
            grid = {row: np.array([found[name] for name in names]) for row, found in group.items()}
            text = f"{base.title}, and what is compared with it: accuracy by corruption, and by severity."
            pictures.append(Picture(f"-{base.name.rpartition('-')[2]}", text, _draw_corrupted(results, names, grid)))
    return pictures


def _draw_corrupted(results: Results, names: list[str], grid: dict[str, Floats]) -> Figure:
    """``grid``: of each row, accuracy by corruption (``names``) and severity."""
    figure, (left, right) = canvas(2.0, 1.25, columns=2)
    kinds = itertools.cycle((("s", "soft"), ("^", "boundary"), ("o", "accent"), ("D", "robust")))
    drawn: dict[str, Any] = {}
    at, means = np.arange(len(names)), np.array([shares.mean(axis=1) for shares in grid.values()])
    left.hlines(at, means.min(axis=0), means.max(axis=0), color=COLOURS["line"], linewidth=2.5, zorder=1)
    for (row, shares), mean in zip(grid.items(), means, strict=True):
        marker, colour = next(kinds)
        look: dict[str, Any] = {"color": COLOURS[colour], "marker": marker, "markersize": 5}
        left.plot(mean, at, linestyle="none", **look)
        clean = results.value(row, "clean")
        start = [] if clean is None else [clean.mean]
        course = [*start, *shares.mean(axis=0)]
        (line,) = right.plot(range(1 - len(start), SEVERITIES + 1), course, linewidth=1.4, **look)
        drawn[results.rows[row].title.rpartition(",")[0]] = line  # all but the data's name
    left.set_yticks(at, [name.replace("_", " ") for name in names])
    left.set(xlabel="accuracy, mean of five severities, %")
    _upright(left)
    right.set(xlabel="severity (0: clean)", ylabel=f"accuracy, mean of {len(names)} corruptions, %")
    right.set_xticks(range(SEVERITIES + 1))
    legend(right, drawn, columns=3 if len(drawn) < 4 else 2)
    return figure


def _by_corruption(results: Results, row: str) -> dict[str, Floats]:
    """Accuracy in percent at each severity, mean of the seeds, of the corruptions that all of them were judged by."""
    value = results.value(row, "corruptions")
    seeds = [figure.get("corruptions", {}) for figure in (value.figures if value else ())]
    names = [name for name in seeds[0] if all(name in seed for seed in seeds)] if seeds else []
    return {name: 100 * np.mean([seed[name] for seed in seeds], axis=0) for name in names}


def _upright(*panels: Axes) -> None:
    """Grid lines for values that lie along the bottom."""
    for axes in panels:
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")


DRAWN: dict[str, Callable[[Results], list[Picture]]] = {
    function.__name__: function
    for function in (shares, svar, allocation, gamma, robust_steps, oracle, ranks, corrupted, plane)
}
