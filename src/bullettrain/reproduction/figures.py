"""The paper's figures from records, as files of their own: PNG and SVG that can stand in a paper.

Each function gives pictures, none where nothing is measured yet; they are drawn inside :func:`printed`.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bullettrain.corruptions.table import SEVERITIES
from bullettrain.extras import extra
from bullettrain.mining import Category
from bullettrain.reporting import figures as report
from bullettrain.reporting.run import Floats, read_batch
from bullettrain.reporting.svg import COLOURS, HEIGHT, WIDTH, printed
from bullettrain.reporting.words import attack_name
from bullettrain.reproduction.records import Record
from bullettrain.reproduction.results import Measured, Results
from bullettrain.reproduction.studies import ROLES, Row, panel_rows
from bullettrain.training.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SYMBOLS = {"N_B": "$N_B$", "N_O": "$N_O$", "N_R": "$N_R$"}
KINDS = {"full attack for all": ("s", "soft"), "BulletTrain": ("o", "accent"), "other": ("^", "boundary")}
"""Markers and colours of methods in the plane."""
FAR = 12.0
"""A method so many points below the best stands at the plane's edge: it would press the others together."""


@dataclass(frozen=True)
class Picture:
    """A figure, what is added to the study's name for its file, and what it shows."""

    suffix: str
    caption: str
    figure: Figure


def draw(results: Results) -> list[Picture]:
    """The study's pictures; to be called, and saved, inside :func:`printed`."""
    name = results.study.figure
    return list(DRAWN[name](results)) if name is not None else []


def write(results: Results, folder: Path) -> list[tuple[str, str, str]]:
    """Save the study's pictures as PNG and SVG: (name of the files, caption, the SVG as a data address) of each."""
    saved = []
    with printed():
        for picture in draw(results):
            name, content = results.study.name + picture.suffix, b""
            # No date: the same figures give the same file.
            for kind, about in (("png", {"Software": None}), ("svg", {"Date": None})):
                buffer = io.BytesIO()
                picture.figure.savefig(buffer, format=kind, dpi=300, facecolor="white", metadata=about)
                content = buffer.getvalue()
                RunFolder(folder).write(f"{name}.{kind}", content)
            address = "data:image/svg+xml;base64," + base64.b64encode(content).decode("ascii")
            saved.append((name, picture.caption, address))
    return saved


def canvas(width: float = 1.0, height: float = 1.0, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side, in units of the report's."""
    with extra("a figure"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width * WIDTH / 72, height * HEIGHT / 72), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _legend(axes: Axes, drawn: dict[str, Any], columns: int = 2) -> None:
    """Above the axes, where it covers nothing."""
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": columns}
    axes.legend(list(drawn.values()), list(drawn), frameon=False, fontsize=9, handlelength=3, **place)


def _label(axes: Axes, words: Sequence[tuple[float, float, str, str]]) -> None:
    """Write words (x, y, text, colour) beside their points into ``axes``, which are finished otherwise."""
    with extra("a figure"):
        from adjustText import adjust_text
    figure: Any = axes.figure
    figure.draw_without_rendering()  # only now everything has its place
    figure.set_layout_engine("none")
    paths = [line.get_transform().transform_path(line.get_path()) for line in axes.lines]
    paths += [axes.transData.transform_path(bar) for bars in axes.collections for bar in bars.get_paths()]
    marks = axes.transData.transform([(x, y) for x, y, *_ in words])
    corners = [marks + np.array(corner) for corner in itertools.product((-6, 6), repeat=2)]
    covered = np.concatenate([*(path.interpolated(6).vertices for path in paths), *corners])
    taken = axes.transData.inverted().transform(covered)
    look: dict[str, Any] = {"fontsize": 8.5, "ha": "center", "bbox": {"fc": COLOURS["card"], "ec": "none", "pad": 0.5}}
    texts = [axes.text(x, y, text, color=COLOURS[colour], **look) for x, y, text, colour in words]
    space: dict[str, Any] = {
        "expand": (1.2, 1.8),
        "force_static": (0.2, 0.3),
        "force_text": (0.4, 0.6),
        "iter_lim": 400,
    }
    adjust_text(texts, *taken.T, ax=axes, arrowprops={"arrowstyle": "-", "color": COLOURS["soft"], "lw": 0.6}, **space)


def _title(results: Results, metric: str) -> str:
    return attack_name(results.metric(metric))


# --------------------------------------------------------------------------------------- of single runs


def _runs(results: Results) -> Iterator[tuple[Row, Record]]:
    """The rows that have been run, each with its first seed."""
    return ((row, results.runs[name][0]) for name, row in results.rows.items() if results.runs[name])


def shares(results: Results) -> Iterator[Picture]:
    """Shares of outlier, boundary and robust examples over epochs (fig. 3)."""
    for row, record in _runs(results):
        if record.mined and (figure := report.draw_shares(record.course())) is not None:
            text = "Shares of outlier, boundary and robust examples over epochs"
            yield Picture(f"-{row.name}", f"{text}. {row.title}.", figure)


def svar(results: Results) -> Iterator[Picture]:
    """Mean SVar of the classes over iterations (fig. 4)."""
    for row, record in _runs(results):
        if (figure := report.draw_svar(record.course(), "step")) is not None:
            text = "Mean signed prediction variance of outlier, boundary and robust examples over iterations"
            yield Picture(f"-{row.name}", f"{text}. {row.title}.", figure)


def allocation(results: Results) -> Iterator[Picture]:
    """One mini-batch: its histogram of SVar with the steps above, and steps by rank (fig. 5)."""
    for row, record in _runs(results):
        batch = read_batch(record.batch or {})
        if batch is None:
            continue
        m, moved = len(batch.svar), int(((batch.svar < 0) & (batch.category != Category.OUTLIER)).sum())
        text = f"A mini-batch by SVar, {m} examples of epoch {batch.epoch:.0f}; above, its steps"
        if moved:  # captured steps round sizes up, towards more care
            text += f"; {moved} that are misclassified were treated as robust, since sizes are rounded up"
        yield Picture("-histogram", f"{text}. {row.title}.", report.draw_histogram(batch))
        yield Picture("-rank", f"Its steps, by rank. {row.title}.", report.draw_allocation(batch))


# ---------------------------------------------------------------------------------------- over a setting


def _sweep(results: Results, symbol: str, stem: str) -> Iterator[Picture]:
    """Clean (dashed) and robust (solid) accuracy against the theoretical speed-up, a point a value of the setting."""
    names = [name for name in results.rows if name.startswith(stem)]
    found = {n: values for n in names if (values := results.values(n, ("theoretical", "clean", "pgd20"))) is not None}
    if len(found) < 2:
        return
    found = dict(sorted(found.items(), key=lambda point: point[1][0].mean))
    figure, (axes,) = canvas()
    x = [speed.mean for speed, *_ in found.values()]
    drawn: dict[str, Any] = {}
    words = []
    for index, metric, style, colour in ((1, "clean", (0, (4, 2)), "soft"), (2, "pgd20", "-", "accent")):
        y = [values[index].mean for values in found.values()]
        spread = [values[index].std or 0.0 for values in found.values()]
        look: dict[str, Any] = {"linestyle": style, "color": COLOURS[colour], "marker": "o", "markersize": 4}
        by = "clean" if metric == "clean" else _title(results, metric)
        bars = spread if any(spread) else None
        drawn[f"TRADES + BT, {by}"] = axes.errorbar(x, y, bars, capsize=2, linewidth=1.5, **look)
        if (base := results.value("trades", metric)) is not None:
            dots: dict[str, Any] = {"color": COLOURS[colour], "linewidth": 0.8, "linestyle": (0, (1, 2))}
            drawn[f"TRADES, {by}"] = axes.axhline(base.mean, **dots)
        texts = [f"{SYMBOLS.get(symbol, symbol)} = {name.removeprefix(stem)}" for name in found]
        words += [(*place, "ink") for place in zip(x, y, texts, strict=True)]
    axes.set(xlabel="theoretical speed-up", ylabel="accuracy, %")
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.margins(x=0.08, y=0.2)
    _legend(axes, drawn)
    _label(axes, words)
    text = f"Accuracy against the theoretical speed-up over {symbol}, which stands at each point; dotted: TRADES"
    yield Picture("", f"{text}.", figure)


def gamma(results: Results) -> Iterator[Picture]:
    """Accuracy and speed-up over γ."""
    return _sweep(results, "γ", "gamma-")


def robust_steps(results: Results) -> Iterator[Picture]:
    """Accuracy and speed-up over N_R."""
    return _sweep(results, "N_R", "nr-")


def oracle(results: Results) -> Iterator[Picture]:
    """The MNIST study: robust accuracy over step counts, one of three at zero in each panel (fig. 2)."""
    grid = results.scale.grid
    maps = {}
    for zero in ROLES:
        values = [results.value(row.name, "pgd100x20") for row in panel_rows(results.scale, zero)]
        means = [np.nan if value is None else value.mean for value in values]
        maps[zero] = np.array(means).reshape(len(grid), len(grid))
    if not any(np.isfinite(cells).any() for cells in maps.values()):
        return
    figure, panels = canvas(2.0, 0.95, columns=3)
    for axes, (zero, cells) in zip(panels, maps.items(), strict=True):
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
    bar = figure.colorbar(image, ax=panels, shrink=0.85, pad=0.02)
    bar.set_label(f"{_title(results, 'pgd100x20')} accuracy, %")
    bar.outline.set_visible(False)
    base = results.value("baseline", "pgd100x20")
    said = f"; the baseline, seven steps for all, has {base.mean:.1f} %" if base is not None else ""
    yield Picture("", f"Robust accuracy with no steps for one class{said}.", figure)


def ranks(results: Results) -> Iterator[Picture]:
    """How well each score orders examples, beside the accuracy that it trains to; nothing where one alone has both."""
    found = [
        (row.title.rpartition(" by ")[2], [value.mean for value in values])
        for row in results.rows.values()
        if not row.plain and (values := results.values(row.name, ("rank", "rank_correct", "pgd20"))) is not None
    ]
    if len(found) < 2:
        return
    figure, (left, right) = canvas(1.5, 0.9, columns=2)
    at = np.arange(len(found))[::-1]
    every, correct, accuracy = np.array([means for _, means in found]).T
    drawn = {
        "all": left.barh(at + 0.18, every, 0.32, color=COLOURS["robust"]),
        "correct only": left.barh(at - 0.18, correct, 0.32, color=COLOURS["boundary"]),
    }
    left.set_yticks(at, [name for name, _ in found])
    left.axvline(0, color=COLOURS["soft"], linewidth=0.8)
    left.set(xlabel="rank correlation with the oracle")
    _legend(left, drawn)
    right.bar_label(right.barh(at, accuracy, 0.5, color=COLOURS["accent"]), fmt="%.1f", padding=3)
    right.set_yticks(at, [""] * len(found))
    right.set(xlabel=f"{_title(results, 'pgd20')} accuracy, %")
    right.margins(x=0.16)
    _upright(left, right)
    yield Picture("", "Scores in the place of SVar: order of examples, and accuracy that comes of it.", figure)


def corrupted(results: Results) -> Iterator[Picture]:
    """Accuracy by corruption, and by severity, of each baseline and of what is compared with it."""
    for base in (row for row in results.rows.values() if row.plain):
        rows = [row.name for row in results.rows.values() if base.name in (row.name, row.baseline)]
        group = {name: found for name in rows if (found := _by_corruption(results, name))}
        first = group.get(base.name, {})
        names = [name for name in first if all(name in found for found in group.values())]
        if names and len(group) > 1:
            names.sort(key=lambda name: float(np.mean(first[name])))
            grid = {row: np.array([found[name] for name in names]) for row, found in group.items()}
            text = f"{base.title}, and what is compared with it: accuracy by corruption, and by severity."
            yield Picture(f"-{base.name.rpartition('-')[2]}", text, _draw_corrupted(results, names, grid))


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
        course = [*([] if clean is None else [clean.mean]), *shares.mean(axis=0)]
        (line,) = right.plot(range(SEVERITIES + 1 - len(course), SEVERITIES + 1), course, linewidth=1.4, **look)
        drawn[results.rows[row].title.rpartition(",")[0]] = line  # all but the data's name
    left.set_yticks(at, [name.replace("_", " ") for name in names])
    left.set(xlabel="accuracy, mean of five severities, %")
    _upright(left)
    right.set(xlabel="severity (0: clean)", ylabel=f"accuracy, mean of {len(names)} corruptions, %")
    right.set_xticks(range(SEVERITIES + 1))
    _legend(right, drawn, columns=3 if len(drawn) < 4 else 2)
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


# -------------------------------------------------------------------------------- accuracy over its cost


@dataclass(frozen=True)
class Point:
    """A method's place in the plane: what its training costs, its accuracy, and two standard errors of that.

    Args:
        part: whether it was evaluated on some of the images alone.
    """

    row: Row
    cost: float
    height: float
    bar: float
    part: bool


def plane(results: Results) -> Iterator[Picture]:
    """AutoAttack accuracy over minutes of training, a point a method: what a user chooses from.

    Where fewer than two methods have AutoAttack accuracy it is PGD-20; where a method has no minutes, since it shared
    its device, the axis is counted passes an example. Methods far below the best stand at the lower edge.
    """
    attack = next((name for name in ("autoattack", "pgd20") if len(_evaluated(results, name)) > 1), None)
    if attack is None:
        return
    points, unit, beside = _points(results, attack)
    heights = sorted((point.height for point in points), reverse=True)
    least = heights[0] - FAR if heights[1] >= heights[0] - FAR else heights[-1]
    edge = min(point.height - point.bar for point in points if point.height >= least) - 3.0
    figure, (axes,) = canvas(1.45, 1.25)
    signs: dict[str, tuple[str, str, str]] = {}
    words, places = [], {}
    for point in points:
        kind = "other" if point.row.method else "full attack for all" if point.row.plain else "BulletTrain"
        (marker, colour), text = KINDS[kind], point.row.title
        signs[kind] = marker, colour, COLOURS[colour]
        for name, symbol in SYMBOLS.items():
            text = text.replace(name, symbol)
        far = point.height < least
        y, bar = (edge, None) if far else (point.height, point.bar or None)
        if far:
            marker, text = "v", f"{text}: {point.height:.1f} %"
            signs["far below, not to scale"] = "v", "soft", COLOURS["soft"]
        elif point.part:
            signs["on some images"] = "o", "soft", "white"
        look: dict[str, Any] = {"color": COLOURS[colour], "marker": marker, "markersize": 6, "linestyle": "none"}
        face = "white" if point.part and not far else COLOURS[colour]
        axes.errorbar(point.cost, y, bar, capsize=2, elinewidth=0.9, markerfacecolor=face, **look)
        words.append((point.cost, y, text, "boundary-ink" if kind == "other" else colour))
        places[point.row.name] = point.cost, y, kind, far
    for point in points:
        x, y, kind, far = places[point.row.name]
        if kind == "BulletTrain" and point.row.baseline in places and not far:
            from_x, from_y, *_ = places[point.row.baseline]
            axes.plot([from_x, x], [from_y, y], color=COLOURS["accent"], lw=0.9, linestyle=(0, (2, 2)), zorder=0)
    axes.set(xlabel=f"training, {unit}", ylabel=f"{_title(results, attack)} accuracy, %")
    axes.margins(x=0.1, y=0.2)
    axes.set_xlim(left=0)
    low, high = axes.get_ylim()
    wider = max(0.0, 6.0 - (high - low)) / 2  # half a point must not look like a cliff
    axes.set_ylim(low - wider, high + wider)
    if "far below, not to scale" in signs:
        axes.set_yticks([tick for tick in axes.get_yticks() if edge + 1.5 < tick < high])
        axes.axhline(edge + 1.5, color=COLOURS["soft"], linewidth=0.9, linestyle=(0, (1, 4)))
    from matplotlib.lines import Line2D

    lines = {
        name: Line2D([], [], color=COLOURS[colour], marker=marker, markerfacecolor=face, linestyle="none")
        for name, (marker, colour, face) in signs.items()
    }
    _legend(axes, lines, columns=3)
    _label(axes, words)
    text = "What each method reaches, over what its training costs; dashes lead from a baseline to BulletTrain on it, "
    text += "bars are two standard errors, of the images and of seeds where there are several"
    if beside:
        text += f"; hollow: on a part of the test images, and placed by how far it is from {beside} on these"
    yield Picture("", f"{text}.", figure)


def _evaluated(results: Results, attack: str) -> list[tuple[Row, Measured]]:
    return [(row, value) for row in results.rows.values() if (value := results.value(row.name, attack)) is not None]


def _points(results: Results, attack: str) -> tuple[list[Point], str, str]:
    """Where methods stand, over which unit, and the row that those evaluated on a part of the images stand beside.

    Another part is harder or easier than the whole, for all methods alike: so such a row's place is that of one that
    was evaluated on all images, and the difference between the two on the images that both have.
    """
    found, none = _evaluated(results, attack), Measured((0.0,))
    minutes = {row.name: value.mean for row, _ in found if (value := results.value(row.name, "minutes")) is not None}
    whole = next(((row, value) for row, value in found if value.figures and not _is_part(value)), None)
    points, beside = [], ""
    for row, value in found:
        height, error = value.mean, value.above(none).error
        if whole is not None and _is_part(value) and (apart := value.above(whole[1])).paired:
            height, beside = whole[1].mean + apart.value, whole[0].title
            error = float(np.hypot(apart.error, whole[1].above(none).error))
        work = float(np.mean([run.work for run in results.runs[row.name]]))
        cost = minutes[row.name] if len(minutes) == len(found) else work
        points.append(Point(row, cost, height, 2 * error, _is_part(value)))
    return points, "minutes" if len(minutes) == len(found) else "counted passes an example", beside


def _is_part(value: Measured) -> bool:
    return any(figure.get("among") for figure in value.figures)


DRAWN: dict[str, Callable[[Results], Iterator[Picture]]] = {
    function.__name__: function
    for function in (shares, svar, allocation, gamma, robust_steps, oracle, ranks, corrupted, plane)
}
