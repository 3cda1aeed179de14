"""The paper's figures from records, as files of their own: PNG and SVG that can stand in a paper.

Each function gives plates, none where nothing is measured yet; they are drawn inside :func:`printed`.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bullettrain.corruptions.table import SEVERITIES
from bullettrain.mining import Category
from bullettrain.reporting import figures as training
from bullettrain.reporting.plotting import COLOURS, Plate, label_points, legend_above, panels, printed
from bullettrain.reproduction.records import Record
from bullettrain.reproduction.results import Results
from bullettrain.reproduction.rows import ROLES, Row, panel_rows
from bullettrain.run_folder import Floats, RunFolder, Table, read_batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SYMBOLS = {"N_B": "$N_B$", "N_O": "$N_O$", "N_R": "$N_R$"}


def draw(results: Results) -> list[Plate]:
    """The study's pictures, named like their files; to be called, and saved, inside :func:`printed`."""
    study = results.study
    found = DRAWN[study.name](results) if study.name in DRAWN else ()
    return [replace(plate, name=study.name + plate.name, title=study.title) for plate in found]


def write(results: Results, folder: Path) -> list[tuple[str, str, str]]:
    """Save the study's pictures as PNG and SVG: (name of the files, caption, the SVG as a data address) of each."""
    saved = []
    with printed():
        for plate in draw(results):
            content = b""
            # No date: the same figures give the same file.
            for kind, about in (("png", {"Software": None}), ("svg", {"Date": None})):
                buffer = io.BytesIO()
                plate.figure.savefig(buffer, format=kind, dpi=300, facecolor="white", metadata=about)
                content = buffer.getvalue()
                RunFolder(folder).write(f"{plate.name}.{kind}", content)
            address = "data:image/svg+xml;base64," + base64.b64encode(content).decode("ascii")
            saved.append((plate.name, plate.caption, address))
    return saved


# --------------------------------------------------------------------------------------- of single runs


def _runs(results: Results) -> Iterator[tuple[Row, Record]]:
    """The rows that have been run, each with its first seed."""
    return ((row, results.runs[name][0]) for name, row in results.rows.items() if results.runs[name])


def _courses(results: Results, draw: Callable[[Table], Plate | None], text: str) -> Iterator[Plate]:
    """A picture of each run's course (figs. 3 and 4)."""
    for row, record in _runs(results):
        if record.curve and (plate := draw(record.course())):
            yield replace(plate, name=f"-{row.name}", caption=f"{text}. {row.title}.")


def allocation(results: Results) -> Iterator[Plate]:
    """One mini-batch: its histogram of SVar with the steps above, and steps by rank (fig. 5)."""
    for row, record in _runs(results):
        batch = read_batch(record.batch or {})
        if batch is None:
            continue
        m, moved = len(batch.svar), int(((batch.svar < 0) & (batch.category != Category.OUTLIER)).sum())
        text = f"A mini-batch by SVar, {m} examples of epoch {batch.epoch:.0f}; above, its steps"
        if moved:  # captured steps round sizes up, towards more care
            text += f"; {moved} that are misclassified were treated as robust, since sizes are rounded up"
        yield replace(training.histogram(batch), name="-histogram", caption=f"{text}. {row.title}.")
        yield replace(training.allocation(batch), name="-rank", caption=f"Its steps, by rank. {row.title}.")


# ---------------------------------------------------------------------------------------- over a setting


def _sweep(results: Results, symbol: str, stem: str) -> Iterator[Plate]:
    """Clean (dashed) and robust (solid) accuracy against the theoretical speed-up, a point a value of the setting."""
    names = [name for name in results.rows if name.startswith(stem)]
    found = {n: values for n in names if (values := results.values(n, ("theoretical", "clean", "pgd20"))) is not None}
    if len(found) < 2:
        return
    found = dict(sorted(found.items(), key=lambda point: point[1][0].mean))
    figure, (axes,) = panels()
    x = [speed.mean for speed, *_ in found.values()]
    drawn: dict[str, Any] = {}
    words = []
    for index, metric, style, colour in ((1, "clean", (0, (4, 2)), "soft"), (2, "pgd20", "-", "accent")):
        y = [values[index].mean for values in found.values()]
        spread = [values[index].std or 0.0 for values in found.values()]
        look: dict[str, Any] = {"linestyle": style, "color": COLOURS[colour], "marker": "o", "markersize": 4}
        by = "clean" if metric == "clean" else results.title(metric)
        bars = spread if any(spread) else None
        drawn[f"TRADES + BT, {by}"] = axes.errorbar(x, y, bars, capsize=2, linewidth=1.5, **look)
        if (base := results.value("trades", metric)) is not None:
            dots: dict[str, Any] = {"color": COLOURS[colour], "linewidth": 0.8, "linestyle": (0, (1, 2))}
            drawn[f"TRADES, {by}"] = axes.axhline(base.mean, **dots)
        texts = [f"{SYMBOLS.get(symbol, symbol)} = {name.removeprefix(stem)}" for name in found]
        words += list(zip(x, y, texts, strict=True))
    axes.set(xlabel="theoretical speed-up", ylabel="accuracy, %")
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.margins(x=0.08, y=0.2)
    legend_above(axes, drawn)
    label_points(axes, words)
    text = f"Accuracy against the theoretical speed-up over {symbol}, which stands at each point; dotted: TRADES"
    yield Plate("", "", f"{text}.", figure)


def oracle(results: Results) -> Iterator[Plate]:
    """The MNIST study: robust accuracy over step counts, one of three at zero in each panel (fig. 2)."""
    grid = results.scale.grid
    maps = {}
    for zero in ROLES:
        values = [results.value(row.name, "pgd100x20") for row in panel_rows(results.scale, zero)]
        means = [np.nan if value is None else value.mean for value in values]
        maps[zero] = np.array(means).reshape(len(grid), len(grid))
    if not any(np.isfinite(cells).any() for cells in maps.values()):
        return
    figure, beside = panels(columns=3, width=2.0, height=0.95)
    for axes, (zero, cells) in zip(beside, maps.items(), strict=True):
        first, second = (SYMBOLS[role] for role in ROLES if role != zero)
        image = axes.imshow(cells, origin="lower", cmap="viridis", vmin=0, vmax=100)
        axes.set(title=f"{SYMBOLS[zero]} = 0", xlabel=second, ylabel=first)
        for setter in (axes.set_xticks, axes.set_yticks):
            setter(range(len(grid)), [str(count) for count in grid])
        axes.grid(visible=False)
        for (row, column), value in np.ndenumerate(cells):
            place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
            text, colour = ("–", "ink") if np.isnan(value) else (f"{value:.1f}", "card" if value < 50 else "ink")
            axes.text(column, row, text, color=COLOURS[colour], **place)
    bar = figure.colorbar(image, ax=beside, shrink=0.85, pad=0.02)
    bar.set_label(f"{results.title('pgd100x20')} accuracy, %")
    bar.outline.set_visible(False)
    base = results.value("baseline", "pgd100x20")
    said = f"; the baseline, seven steps for all, has {base.mean:.1f} %" if base is not None else ""
    yield Plate("", "", f"Robust accuracy with no steps for one class{said}.", figure)


def corrupted(results: Results) -> Iterator[Plate]:
    """Accuracy by corruption, and by severity, of each baseline and of what is compared with it."""
    for base in (row for row in results.rows.values() if row.plain):
        rows = [row for row in results.rows.values() if base.name in (row.name, row.baseline)]
        group = {row.name: found for row in rows if (found := _by_corruption(results, row.name))}
        first = group.get(base.name, {})
        names = [name for name in first if all(name in found for found in group.values())]
        if not names or len(group) < 2:
            continue
        names.sort(key=lambda name: float(np.mean(first[name])))
        shares = {name: np.array([found[each] for each in names]) for name, found in group.items()}
        text = f"{base.title}, and what is compared with it: accuracy by corruption, and by severity."
        yield Plate(f"-{base.name.rpartition('-')[2]}", "", text, _draw_corruptions(results, names, shares))


def _draw_corruptions(results: Results, names: Sequence[str], rows: Mapping[str, Floats]) -> Figure:
    """The picture; ``rows``: by row, accuracy in percent under each of ``names`` at each severity."""
    figure, (left, right) = panels(columns=2, width=2.0, height=1.25)
    kinds = itertools.cycle((("s", "soft"), ("^", "boundary"), ("o", "accent"), ("D", "robust")))
    drawn: dict[str, Any] = {}
    at, means = np.arange(len(names)), np.array([shares.mean(axis=1) for shares in rows.values()])
    left.hlines(at, means.min(axis=0), means.max(axis=0), color=COLOURS["line"], linewidth=2.5, zorder=1)
    for (name, shares), mean, (marker, colour) in zip(rows.items(), means, kinds, strict=False):
        look: dict[str, Any] = {"color": COLOURS[colour], "marker": marker, "markersize": 5}
        left.plot(mean, at, linestyle="none", **look)
        clean = results.value(name, "clean")
        course = [clean.mean if clean else np.nan, *shares.mean(axis=0)]
        (line,) = right.plot(range(SEVERITIES + 1), course, linewidth=1.4, **look)
        drawn[results.rows[name].title.rpartition(",")[0]] = line
    left.set_yticks(at, [name.replace("_", " ") for name in names])
    left.set(xlabel="accuracy, mean of five severities, %")
    left.grid(visible=False, axis="y")
    left.grid(visible=True, axis="x")
    right.set(xlabel="severity (0: clean)", ylabel=f"accuracy, mean of {len(names)} corruptions, %")
    right.set_xticks(range(SEVERITIES + 1))
    legend_above(right, drawn, columns=3 if len(drawn) < 4 else 2)
    return figure


def _by_corruption(results: Results, row: str) -> dict[str, Floats]:
    """Accuracy in percent at each severity, mean of the seeds, of the corruptions that all seeds have."""
    value = results.value(row, "corruptions")
    seeds = [figure.get("corruptions", {}) for figure in (value.figures if value else ())]
    names = [name for name in seeds[0] if all(name in seed for seed in seeds)] if seeds else []
    return {name: 100 * np.mean([seed[name] for seed in seeds], axis=0) for name in names}


DRAWN: dict[str, Callable[[Results], Iterator[Plate]]] = {
    "table-augmix": corrupted,
    "fig-oracle": oracle,
    "fig-shares": partial(
        _courses, draw=training.shares, text="Shares of outlier, boundary and robust examples over epochs"
    ),
    "fig-svar": partial(
        _courses,
        draw=partial(training.svar, over="step"),
        text="Mean signed prediction variance of outlier, boundary and robust examples over iterations",
    ),
    "fig-allocation": allocation,
    "fig-gamma": partial(_sweep, symbol="γ", stem="gamma-"),
    "fig-nr": partial(_sweep, symbol="N_R", stem="nr-"),
}
"""By study."""
