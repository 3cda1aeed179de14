"""What the figures have in common: panels, lines, words at the ends of lines, and long series made short."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bullettrain.extras import extra
from bullettrain.reporting.svg import COLOURS, HEIGHT, WIDTH
from bullettrain.run_folder import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 250  # a curve's most points: what a screen shows, and what keeps the page small


@dataclass(frozen=True)
class Curve:
    """One line: where it runs, its colour, the word at its end, and how it is drawn."""

    x: Floats
    y: Floats
    colour: str
    label: str = ""
    style: str = "-"


def panels(*heights: float) -> tuple[Figure, list[Axes]]:
    """A figure of panels under each other that share their x axis."""
    with extra("a report"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    return figure, list(grid[:, 0])


def panels_beside(width: float = 1.0, height: float = 1.0, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side, in units of the report's."""
    with extra("a figure"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width * WIDTH / 72, height * HEIGHT / 72), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def legend_above(axes: Axes, drawn: dict[str, Any], columns: int = 2) -> None:
    """Above the axes, where it covers nothing."""
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": columns}
    axes.legend(list(drawn.values()), list(drawn), frameon=False, fontsize=9, handlelength=3, **place)


def label_points(axes: Axes, words: Sequence[tuple[float, float, str, str]]) -> None:
    """Write words (x, y, text, colour) beside their points into ``axes``, which are finished otherwise."""
    with extra("a figure"):
        from adjustText import adjust_text
    figure: Any = axes.figure
    figure.draw_without_rendering()  # only now everything has its place
    figure.set_layout_engine("none")
    drawn = [line for line in axes.lines if line.get_linestyle() != "None"]
    paths = [line.get_transform().transform_path(line.get_path()) for line in drawn]
    paths += [axes.transData.transform_path(bar) for bars in axes.collections for bar in bars.get_paths()]
    marks = axes.transData.transform([(x, y) for x, y, *_ in words])
    corners = [marks + np.array(corner) for corner in itertools.product((-6, 6), repeat=2)]
    covered = np.concatenate([*(path.interpolated(6).vertices for path in paths), *corners])
    taken = axes.transData.inverted().transform(covered)
    look: dict[str, Any] = {"fontsize": 8.5, "ha": "center", "bbox": {"fc": COLOURS["card"], "ec": "none", "pad": 0.5}}
    texts = [axes.text(x, y, text, color=COLOURS[colour], **look) for x, y, text, colour in words]
    space: dict[str, Any] = {"expand": (1.2, 1.8), "force_static": (0.2, 0.3), "force_text": (0.4, 0.6)}
    ties = {"arrowstyle": "-", "color": COLOURS["soft"], "lw": 0.6}
    adjust_text(texts, *taken.T, ax=axes, iter_lim=400, arrowprops=ties, **space)


def line(axes: Axes, curve: Curve, width: float = 1.6) -> None:
    """Draw a curve in its style; a single point is a dot."""
    colour = COLOURS[curve.colour]
    known = np.isfinite(curve.y)
    if curve.style == "o":
        axes.plot(curve.x, curve.y, "o", color=colour, markersize=3.6, markeredgecolor=COLOURS["card"], mew=0.6)
    elif curve.style == "--":
        axes.plot(curve.x[known], curve.y[known], linestyle=(0, (4, 2)), color=colour, linewidth=1.1, alpha=0.8)
    else:  # a gap stays a gap: that is where the value was not a number
        axes.plot(curve.x, curve.y, "-", color=colour, linewidth=width)
    if known.sum() == 1 and curve.style != "o":
        axes.plot(curve.x[known], curve.y[known], "o", color=colour, markersize=5)


def percent_axis(axes: Axes, *, limits: bool = True) -> None:
    """Label fractions as percentages, within sensible limits."""
    from matplotlib.ticker import MaxNLocator

    if limits:
        low, high = axes.get_ylim()
        low, high = max(low, -0.02), min(high, 1.02)
        axes.set_ylim((low, high) if high - low > 0.1 else (max(0.0, low - 0.05), min(1.02, high + 0.05)))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))  # steps of 2.5 % would be rounded
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def end_labels(axes: Axes, labels: list[tuple[float, str, str]], gap: float = 0.1) -> None:
    """Words at the right end of the lines, moved apart where they would overlap: (height, text, colour)."""
    low, high = axes.get_ylim()
    wanted = sorted(((y - low) / (high - low), text, colour) for y, text, colour in labels if np.isfinite(y))
    places = [place for place, _, _ in wanted]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + gap)
    over = max(0.0, places[-1] - 1.0) if places else 0.0
    for index in range(len(places) - 1, -1, -1):
        places[index] = min(places[index], places[index + 1] - gap if index + 1 < len(places) else places[index] - over)
    for place, (_, text, colour) in zip(places, wanted, strict=True):
        style: dict[str, Any] = {"color": COLOURS[colour], "va": "center", "ha": "left", "annotation_clip": False}
        axes.annotate(text, (1.0, place), xytext=(6, 0), xycoords="axes fraction", textcoords="offset points", **style)


def ink(colour: str) -> str:
    """The colour's variant for text, where it has one."""
    return f"{colour}-ink" if f"{colour}-ink" in COLOURS else colour


def last(values: Floats) -> float:
    """The last finite value, NaN where there is none."""
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else float("nan")


def thin(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """At most POINTS points: the mean of each run of neighbours, NaN only where all of them are."""
    if len(x) <= POINTS:
        return x, y
    known = np.isfinite(y)
    starts = np.unique(np.linspace(0, len(x), POINTS, endpoint=False).astype(np.int64))
    counts = np.add.reduceat(known.astype(np.float64), starts)
    sums = np.add.reduceat(np.where(known, y, 0.0), starts)
    sizes = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / sizes, np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
