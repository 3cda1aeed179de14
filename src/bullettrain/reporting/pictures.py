"""Pictures that stand by themselves, of several methods beside each other."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bullettrain.corruptions.table import SEVERITIES
from bullettrain.reporting.plotting import COLOURS, label_points, legend_above, panels
from bullettrain.run_folder import Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYMBOLS = {"N_B": "$N_B$", "N_O": "$N_O$", "N_R": "$N_R$"}
Kind = Literal["full attack for all", "BulletTrain", "other"]
KINDS: dict[Kind, tuple[str, str]] = {
    "full attack for all": ("s", "soft"),
    "BulletTrain": ("o", "accent"),
    "other": ("^", "boundary"),
}
"""Markers and colours of methods in the plane."""
FAR = 12.0
"""A method so many points below the best stands at the plane's edge: it would press the others together."""


@dataclass(frozen=True)
class PlanePoint:
    """A method in the plane: what its training costs, its accuracy in percent, half the length of the bar around that,
    and the title of the method that it speeds up."""

    title: str
    kind: Kind
    cost: float
    accuracy: float
    bar: float
    baseline: str | None = None


def draw_plane(points: Sequence[PlanePoint], xlabel: str, ylabel: str) -> Figure:
    """Accuracy over cost, at least two methods; dashes lead from a baseline to BulletTrain on it.

    Methods far below the best stand at the lower edge, with their figures.
    """
    heights = sorted((point.accuracy for point in points), reverse=True)
    least = heights[0] - FAR if heights[1] >= heights[0] - FAR else heights[-1]
    edge = min(point.accuracy - point.bar for point in points if point.accuracy >= least) - 3.0
    figure, (axes,) = panels(width=1.45, height=1.25)
    drawn: dict[str, Any] = {}
    words = []
    for kind, far in itertools.product(KINDS, (False, True)):
        group = [point for point in points if point.kind == kind and (point.accuracy < least) == far]
        (marker, colour), shown = KINDS[kind], [edge if far else point.accuracy for point in group]
        look: dict[str, Any] = {"color": COLOURS[colour], "marker": "v" if far else marker, "linestyle": "none"}
        bars = [0.0 if far else point.bar for point in group]
        if group:
            drawn["far below, not to scale" if far else kind] = axes.errorbar(
                [point.cost for point in group], shown, bars if any(bars) else None, capsize=2, elinewidth=0.9, **look
            )
        for point, y in zip(group, shown, strict=True):
            text = point.title + (f": {point.accuracy:.1f} %" if far else "")
            ink = "boundary-ink" if kind == "other" else colour
            words.append((point.cost, y, re.sub("N_[BOR]", lambda found: SYMBOLS[found[0]], text), ink))
    near = {point.title: (point.cost, point.accuracy) for point in points if point.accuracy >= least}
    for point in points:
        if point.kind == "BulletTrain" and {point.title, point.baseline} <= near.keys():
            ends = zip(near[point.baseline or ""], near[point.title], strict=True)
            axes.plot(*ends, color=COLOURS["accent"], linewidth=0.9, linestyle=(0, (2, 2)), zorder=0)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.margins(x=0.1, y=0.2)
    axes.set_xlim(left=0)
    low, high = axes.get_ylim()
    wider = max(0.0, 6.0 - (high - low)) / 2  # half a point must not look like a cliff
    axes.set_ylim(low - wider, high + wider)
    if len(near) < len(points):
        axes.set_yticks([tick for tick in axes.get_yticks() if edge + 1.5 < tick < high])
        axes.axhline(edge + 1.5, color=COLOURS["soft"], linewidth=0.9, linestyle=(0, (1, 4)))
    legend_above(axes, drawn, columns=4)
    label_points(axes, words)
    return figure


def draw_corruptions(names: Sequence[str], rows: Mapping[str, tuple[float | None, Floats]]) -> Figure:
    """Accuracy by corruption, and by severity.

    Args:
        rows: by title: clean accuracy, if it is known, and that under each of ``names`` at each severity, in percent.
    """
    figure, (left, right) = panels(columns=2, width=2.0, height=1.25)
    kinds = itertools.cycle((("s", "soft"), ("^", "boundary"), ("o", "accent"), ("D", "robust")))
    drawn: dict[str, Any] = {}
    at, means = np.arange(len(names)), np.array([shares.mean(axis=1) for _, shares in rows.values()])
    left.hlines(at, means.min(axis=0), means.max(axis=0), color=COLOURS["line"], linewidth=2.5, zorder=1)
    for (title, (clean, shares)), mean, (marker, colour) in zip(rows.items(), means, kinds, strict=False):
        look: dict[str, Any] = {"color": COLOURS[colour], "marker": marker, "markersize": 5}
        left.plot(mean, at, linestyle="none", **look)
        course = [*([] if clean is None else [clean]), *shares.mean(axis=0)]
        (drawn[title],) = right.plot(range(SEVERITIES + 1 - len(course), SEVERITIES + 1), course, linewidth=1.4, **look)
    left.set_yticks(at, [name.replace("_", " ") for name in names])
    left.set(xlabel="accuracy, mean of five severities, %")
    left.grid(visible=False, axis="y")
    left.grid(visible=True, axis="x")
    right.set(xlabel="severity (0: clean)", ylabel=f"accuracy, mean of {len(names)} corruptions, %")
    right.set_xticks(range(SEVERITIES + 1))
    legend_above(right, drawn, columns=3 if len(drawn) < 4 else 2)
    return figure
