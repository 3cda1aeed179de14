"""The picture that a user chooses a method from: accuracy over what training costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bullettrain.reporting.svg import COLOURS
from bullettrain.reproduction.canvas import NAMES, Picture, attack_of, canvas, legend
from bullettrain.reproduction.labels import Line, Word, label
from bullettrain.reproduction.results import Measured, Results
from bullettrain.reproduction.study import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_SPAN = 6.0
"""Points of accuracy that the plane shows at least."""
GAP = 3.0
"""Of these, what lies between the lowest and those that are far below it."""
FAR = 12.0
"""A method so many points below the best stands at the edge: it would press the others together."""
KINDS = {"full attack for all": ("s", "soft"), "BulletTrain": ("o", "accent"), "other": ("^", "boundary")}
PART, BELOW, FROM_BASELINE = "on some images", "far below, not to scale", "from its baseline"


@dataclass(frozen=True)
class Point:
    """A method's place in the plane."""

    row: Row
    at: float
    """What its training costs."""
    height: float
    bar: float
    is_part: bool
    """Judged on some of the images alone."""
    below: bool = False
    """Far below the best: its figure is given, and it stands at the edge."""

    @property
    def kind(self) -> str:
        """A key of ``KINDS``."""
        if self.row.method is not None:
            return "other"
        return "full attack for all" if self.row.plain else "BulletTrain"

    def word(self, edge: float) -> Word:
        """Its name, for humans."""
        text = self.row.title
        for symbol, name in NAMES.items():
            text = text.replace(symbol, name)
        colour = COLOURS["boundary-ink" if self.kind == "other" else KINDS[self.kind][1]]
        at = edge if self.below else self.height
        return Word(self.at, at, f"{text}: {self.height:.1f} %" if self.below else text, colour)


def plane(results: Results) -> list[Picture]:
    """Accuracy over what training costs, a point a method; AutoAttack over minutes where they are known.

    Runs that shared a device have no minutes; where one has none, the axis is counted passes an example. Where fewer
    than two methods can be shown by AutoAttack, it is PGD-20; where not by that either, there is no plane. The axes
    say which.
    """
    for attack in ("autoattack", "pgd20"):
        by = {cost: _judged(results, attack, cost) for cost in ("minutes", "passes")}
        cost = "minutes" if len(by["minutes"]) >= len(by["passes"]) else "passes"
        if len(by[cost]) > 1:
            break
    else:
        return []
    points, edge, beside = _points(by[cost])
    figure, (axes,) = canvas(1.45, 1.25)
    drawn: dict[str, Any] = {}
    words = [point.word(edge) for point in points]
    lines: list[Line] = []
    for point, word in zip(points, words, strict=True):
        drawn |= _draw(axes, point, word.y)
        lines.append(((point.at, word.y - point.bar), (point.at, word.y + point.bar)))
    shown = {point.row.name: (word.x, word.y) for point, word in zip(points, words, strict=True)}
    for point in points:
        if point.row.baseline in shown and point.row.method is None and not point.below:
            lines.append((shown[point.row.baseline], shown[point.row.name]))
            dashes: dict[str, Any] = {"linewidth": 0.9, "linestyle": (0, (2, 2)), "zorder": 0}
            (drawn[FROM_BASELINE],) = axes.plot(*zip(*lines[-1], strict=True), color=COLOURS["accent"], **dashes)
    unit = "training, minutes" if cost == "minutes" else "training, counted passes an example"
    axes.set(xlabel=unit, ylabel=f"{attack_of(results, attack)} accuracy, %")
    axes.margins(x=0.1, y=0.2)
    axes.set_xlim(left=0)
    low, high = axes.get_ylim()
    wider = max(0.0, LEAST_SPAN - (high - low)) / 2  # half a point must not look like a cliff
    axes.set_ylim(low - wider, high + wider)
    if BELOW in drawn:
        lines.append(_broken(axes, edge + GAP / 2))
    order = [name for name in (*KINDS, PART, BELOW, FROM_BASELINE) if name in drawn]
    legend(axes, {name: drawn[name] for name in order}, columns=4 if len(drawn) < 5 else 3)
    label(axes, words, lines)
    return [Picture("", _caption(drawn, beside), figure)]


def _draw(axes: Axes, point: Point, height: float) -> dict[str, Any]:
    """The point with its bar, and what the legend has to say about it."""
    marker, colour = KINDS[point.kind]
    signs = {point.kind: _sign(marker, colour)}
    look: dict[str, Any] = {"color": COLOURS[colour], "marker": marker, "markersize": 6, "linestyle": "none"}
    if point.below:
        look |= {"marker": "v"}
        signs[BELOW] = _sign("v", "soft")
    elif point.is_part:
        look |= {"markerfacecolor": "white"}
        signs[PART] = _sign("o", "soft", hollow=True)
    axes.errorbar(point.at, height, point.bar or None, capsize=2, elinewidth=0.9, **look)
    return signs


def _broken(axes: Axes, height: float) -> Line:
    """Break the axis: below ``height`` nothing is to scale, and no number stands beside it."""
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in axes.get_yticks() if height < tick < high])
    axes.axhline(height, color=COLOURS["soft"], linewidth=0.9, linestyle=(0, (1, 4)))
    axes.set_ylim(low, high)
    left, right = axes.get_xlim()
    return (left, height), (right, height)


def _sign(marker: str, colour: str, *, hollow: bool = False) -> Any:
    """What a legend shows."""
    from matplotlib.lines import Line2D

    face = "white" if hollow else COLOURS[colour]
    return Line2D([], [], color=COLOURS[colour], marker=marker, markersize=6, markerfacecolor=face, linestyle="none")


def _caption(drawn: dict[str, Any], beside: str) -> str:
    text = "What each method reaches, over what its training costs; dashes lead from a baseline to BulletTrain on it"
    text += ", bars are two standard errors, of the images that were judged and of seeds where there are several"
    if PART in drawn:
        text += "; hollow: judged on a part of the test images"
        text += f", and placed by how far it is from {beside} on these" if beside else ""
    if BELOW in drawn:
        text += f"; below the dots, not to scale, with its figure: more than {FAR:.0f} points below the best"
    return f"{text}."


def _points(found: list[tuple[float, Measured, Row]]) -> tuple[list[Point], float, str]:
    """Where methods stand; the height of those far below the best, so that the others can be told apart; and the row
    that those judged on a part of the images stand beside.

    Another part is harder or easier than the whole, for all methods alike: so such a row's place is that of one that
    was judged on all images, and the difference between the two on the images that both have. Bars are two standard
    errors.
    """
    whole = next(((judged, row) for _, judged, row in found if judged.figures and not _is_part(judged)), None)
    points, beside = [], ""
    for at, judged, row in found:
        height, error = judged.mean, judged.above(Measured((0.0,))).error
        if whole is not None and _is_part(judged) and (apart := judged.above(whole[0])).paired:
            height, beside = whole[0].mean + apart.value, whole[1].title
            error = math.hypot(apart.error, whole[0].above(Measured((0.0,))).error)
        points.append(Point(row, at, height, 2 * error, _is_part(judged)))
    best = max(point.height for point in points)
    kept = [point for point in points if point.height >= best - FAR]
    if not 1 < len(kept) < len(points):
        return points, -math.inf, beside
    edge = min(point.height - point.bar for point in kept) - GAP
    return [p if p in kept else replace(p, bar=0.0, below=True) for p in points], edge, beside


def _is_part(judged: Measured) -> bool:
    """Whether it is of some of the images alone."""
    return any(figure.get("among") for figure in judged.figures)


def _judged(results: Results, attack: str, cost: str) -> list[tuple[float, Measured, Row]]:
    """Cost and accuracy of the rows that have both."""
    points = []
    for row in results.rows.values():
        runs, minutes, judged = (
            results.runs[row.name],
            results.value(row.name, "minutes"),
            results.value(row.name, attack),
        )
        at = float(np.mean([run.work for run in runs])) if cost == "passes" and runs else minutes and minutes.mean
        if judged is not None and at:
            points.append((at, judged, row))
    return points
