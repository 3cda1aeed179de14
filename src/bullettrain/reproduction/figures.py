"""Draw the paper's figures from records, as PNG and SVG.

Each function yields plates, or none if nothing is measured yet. Call them inside :func:`printed`.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bullettrain.corruptions.table import SEVERITIES
from bullettrain.mining import Category
from bullettrain.reporting import figures as training
from bullettrain.reporting.plotting import COLOURS, Plate, label_points, legend_above, panels, printed
from bullettrain.reproduction.records import Record
from bullettrain.reproduction.results import Results
from bullettrain.reproduction.rows import ROLES, Row, panel_rows
from bullettrain.run_folder import Floats, RunFolder, Table, read_batch


def draw(results: Results) -> list[Plate]:
    """Return the figures of the study. Call it, and save them, inside :func:`printed`."""
    study = results.study
    plates = DRAWN[study.name](results) if study.name in DRAWN else ()
    return [replace(plate, name=study.name + plate.name, title=study.title) for plate in plates]


def write(results: Results, folder: Path) -> list[tuple[str, str, str]]:
    """Save the figures of the study as PNG and SVG. Returns (file name, caption, SVG as a data URL) for each."""
    saved = []
    with printed():
        for plate in draw(results):
            content = b""
            # Without a date, equal figures give equal files.
            for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
                buffer = io.BytesIO()
                plate.figure.savefig(buffer, format=kind, dpi=150, facecolor="white", metadata=metadata)
                content = buffer.getvalue()
                RunFolder(folder).write(f"{plate.name}.{kind}", content)
            address = "data:image/svg+xml;base64," + base64.b64encode(content).decode("ascii")
            saved.append((plate.name, plate.caption, address))
    return saved


# --------------------------------------------------------------------------------------- of single runs


def _runs(results: Results) -> Iterator[tuple[Row, Record]]:
    """Yield the rows that have been run, with the record of the first seed."""
    return ((row, results.runs[name][0]) for name, row in results.rows.items() if results.runs[name])


def _courses(results: Results, draw: Callable[[Table], Plate | None], text: str) -> Iterator[Plate]:
    """Draw the training curve of each run."""
    for row, record in _runs(results):
        if record.curve and (plate := draw(record.course())):
            yield replace(plate, name=f"-{row.name}", caption=f"{text}. {row.title}.")


def shares(results: Results) -> Iterator[Plate]:
    """Draw the shares of the categories over training (fig. 3)."""
    return _courses(results, training.shares, "Shares of outlier, boundary and robust examples over epochs")


def svar(results: Results) -> Iterator[Plate]:
    """Draw the mean SVar of the categories over training (fig. 4)."""
    text = "Mean signed prediction variance of outlier, boundary and robust examples over iterations"
    return _courses(results, partial(training.svar, over="step"), text)


def allocation(results: Results) -> Iterator[Plate]:
    """Draw the steps of one batch over SVar and over its rank (fig. 5)."""
    for row, record in _runs(results):
        batch = read_batch(record.batch or {})
        if batch is None:
            continue
        m, moved = len(batch.svar), int(((batch.svar < 0) & (batch.category != Category.OUTLIER)).sum())
        text = f"A mini-batch by SVar, {m} examples of epoch {batch.epoch:.0f}; above, its steps"
        if moved:  # captured steps round sizes up
            text += f"; {moved} that are misclassified were treated as robust, since sizes are rounded up"
        yield replace(training.histogram(batch), name="-histogram", caption=f"{text}. {row.title}.")
        yield replace(training.allocation(batch), name="-rank", caption=f"Its steps, by rank. {row.title}.")


# ---------------------------------------------------------------------------------------- over a setting


def _sweep(results: Results, symbol: str, stem: str) -> Iterator[Plate]:
    """Draw clean (dashed) and robust (solid) accuracy over the theoretical speed-up, for values of a setting."""
    names = [name for name in results.rows if name.startswith(stem)]
    points = {n: values for n in names if (values := results.values(n, ("theoretical", "clean", "pgd20"))) is not None}
    if len(points) < 2:
        return
    points = dict(sorted(points.items(), key=lambda point: point[1][0].mean))
    figure, (axes,) = panels()
    x = [speed.mean for speed, *_ in points.values()]
    drawn: dict[str, Any] = {}
    words = []
    for index, metric, style, colour in ((1, "clean", (0, (4, 2)), "soft"), (2, "pgd20", "-", "accent")):
        y = [values[index].mean for values in points.values()]
        spread = [values[index].std or 0.0 for values in points.values()]
        look: dict[str, Any] = {"linestyle": style, "color": COLOURS[colour], "marker": "o", "markersize": 4}
        by = "clean" if metric == "clean" else results.title(metric)
        bars = spread if any(spread) else None
        drawn[f"TRADES + BT, {by}"] = axes.errorbar(x, y, bars, capsize=2, linewidth=1.5, **look)
        if (base := results.value("trades", metric)) is not None:
            dots: dict[str, Any] = {"color": COLOURS[colour], "linewidth": 0.8, "linestyle": (0, (1, 2))}
            drawn[f"TRADES, {by}"] = axes.axhline(base.mean, **dots)
        texts = [f"{symbol} = {name.removeprefix(stem)}" for name in points]
        words += list(zip(x, y, texts, strict=True))
    axes.set(xlabel="theoretical speed-up", ylabel="accuracy, %")
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.margins(x=0.08, y=0.2)
    legend_above(axes, drawn)
    label_points(axes, words)
    plain = symbol.strip("$")
    text = f"Accuracy against the theoretical speed-up over {plain}, which stands at each point; dotted: TRADES."
    yield Plate("", "", text, figure)


def oracle(results: Results) -> Iterator[Plate]:
    """Draw robust accuracy over step counts in the MNIST study; each panel has one of three at zero (fig. 2)."""
    grid, metric = results.scale.grid, results.study.attacks[-1]
    maps = {}
    for zero in ROLES:
        values = [results.value(row.name, metric) for row in panel_rows(results.scale, zero)]
        means = [np.nan if value is None else value.mean for value in values]
        maps[zero] = np.array(means).reshape(len(grid), len(grid))
    if all(np.isfinite(cells).sum() < 2 for cells in maps.values()):
        return
    figure, row_of_axes = panels(columns=3, width=2.0, height=0.95)
    for axes, (zero, cells) in zip(row_of_axes, maps.items(), strict=True):
        first, second = (f"${role}$" for role in ROLES if role != zero)
        image = axes.imshow(cells, origin="lower", cmap="viridis", vmin=0, vmax=100)
        axes.set(title=f"${zero}$ = 0", xlabel=second, ylabel=first)
        for setter in (axes.set_xticks, axes.set_yticks):
            setter(range(len(grid)), [str(count) for count in grid])
        axes.grid(visible=False)
        for (row, column), value in np.ndenumerate(cells):
            place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
            text, colour = ("–", "ink") if np.isnan(value) else (f"{value:.1f}", "card" if value < 50 else "ink")
            axes.text(column, row, text, color=COLOURS[colour], **place)
    bar = figure.colorbar(image, ax=row_of_axes, shrink=0.85, pad=0.02)
    bar.set_label(f"{results.title(metric)} accuracy, %")
    bar.outline.set_visible(False)
    base = results.value("baseline", metric)
    beside = f"; the baseline, seven steps for all, has {base.mean:.1f} %" if base is not None else ""
    yield Plate("", "", f"Robust accuracy with no steps for one class{beside}.", figure)


def corrupted(results: Results) -> Iterator[Plate]:
    """Draw accuracy by corruption and by severity, of each baseline and the rows compared with it."""
    for base in (row for row in results.rows.values() if row.baseline is None):
        rows = [row for row in results.rows.values() if base.name in (row.name, row.baseline)]
        group = {row.name: accuracy for row in rows if (accuracy := _by_corruption(results, row.name))}
        first = group.get(base.name, {})
        names = [name for name in first if all(name in accuracy for accuracy in group.values())]
        if not names or len(group) < 2:
            continue
        names.sort(key=lambda name: float(np.mean(first[name])))
        shares = {name: np.array([accuracy[each] for each in names]) for name, accuracy in group.items()}
        plate = _draw_corruptions(results, names, shares)
        text = f"{base.title}, and what is compared with it: accuracy by corruption, and by severity."
        yield replace(plate, name=f"-{base.name.rpartition('-')[2]}", caption=text)


def _draw_corruptions(results: Results, names: Sequence[str], rows: Mapping[str, Floats]) -> Plate:
    """Draw ``rows``: for each, accuracy in percent by corruption (``names``) and severity."""
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
    return Plate("", "", "", figure)


def _by_corruption(results: Results, row: str) -> dict[str, Floats]:
    """Return the mean accuracy over seeds, in percent, by corruption and severity."""
    value = results.value(row, "corruptions")
    seeds = [figure.get("corruptions", {}) for figure in (value.figures if value else ())]
    names = [name for name in seeds[0] if all(name in seed for seed in seeds)] if seeds else []
    return {name: 100 * np.mean([seed[name] for seed in seeds], axis=0) for name in names}


DRAWN: dict[str, Callable[[Results], Iterator[Plate]]] = {
    "table-augmix": corrupted,
    **dict.fromkeys(("fig-oracle", "fig-oracle-clean", "fig-oracle-stop"), oracle),
    "fig-shares": shares,
    "fig-svar": svar,
    "fig-allocation": allocation,
    "fig-gamma": partial(_sweep, symbol="γ", stem="gamma-"),
    "fig-nr": partial(_sweep, symbol="$N_R$", stem="nr-"),
}
"""Figures by study."""
