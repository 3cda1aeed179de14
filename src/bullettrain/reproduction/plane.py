"""The picture that a user chooses a method from: accuracy over what training costs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bullettrain.reporting.svg import COLOURS
from bullettrain.reproduction.canvas import NAMES, Picture, attack_of, canvas, legend
from bullettrain.reproduction.labels import Line, Word, label
from bullettrain.reproduction.results import Measured, Results
from bullettrain.reproduction.study import Row

LEAST_SPAN = 6.0
"""Points of accuracy that the plane shows at least."""
FAR = 12.0
"""A method so many points below the best stands at the edge: it would press the others together."""
KINDS = {"full attack for all": ("s", "soft"), "BulletTrain": ("o", "accent"), "other": ("^", "boundary")}
PART, BELOW, FROM_BASELINE = "judged on some images", "far below", "from its baseline"


def plane(results: Results) -> list[Picture]:
    """Accuracy over what training costs, a point a method; AutoAttack over minutes where they are known.

    Runs that shared a device have no minutes; where one has none, the axis is counted passes an example. Where fewer
    than two methods can be shown by AutoAttack, it is PGD-20; where not by that either, there is no plane. The axes
    say which.
    """
    for attack in ("autoattack", "pgd20"):
        by = {cost: _points(results, attack, cost) for cost in ("minutes", "passes")}
        cost = "minutes" if len(by["minutes"]) >= len(by["passes"]) else "passes"
        points = by[cost]
        if len(points) > 1:
            break
    else:
        return []
    figure, (axes,) = canvas(1.45, 1.25)
    drawn: dict[str, Any] = {}
    words: list[Word] = []
    lines: list[Line] = []
    placed, beside = _placed(points)
    edge = _edge(list(placed.values()))
    shown = {row.name: (at, max(placed[row.name][0], edge)) for at, _, row in points}
    for at, judged, row in points:
        height, bar = placed[row.name]
        kind = "other" if row.method is not None else "full attack for all" if row.plain else "BulletTrain"
        marker, colour = KINDS[kind]
        look: dict[str, Any] = {"color": COLOURS[colour], "marker": marker, "markersize": 6, "linestyle": "none"}
        text = row.title
        for symbol, name in NAMES.items():
            text = text.replace(symbol, name)
        if below := height < edge:
            look |= {"marker": "v"}
            text, height, bar = f"{text}: {height:.1f} %", edge, 0.0
        elif _is_part(judged):
            look |= {"markerfacecolor": "white"}
        axes.errorbar(at, height, bar or None, capsize=2, elinewidth=0.9, **look)
        drawn |= {kind: _sign(marker, colour)}
        drawn |= {BELOW: _sign("v", "soft")} if below else {}
        drawn |= {PART: _sign("o", "soft", hollow=True)} if _is_part(judged) and not below else {}
        words.append(Word(at, height, text, COLOURS["boundary-ink" if kind == "other" else colour]))
        lines.append(((at, height - bar), (at, height + bar)))
    for _, _, row in points:
        if row.baseline in shown and row.method is None:
            lines.append((shown[row.baseline], shown[row.name]))
            dashes: dict[str, Any] = {"linewidth": 0.9, "linestyle": (0, (2, 2)), "zorder": 0}
            (drawn[FROM_BASELINE],) = axes.plot(*zip(*lines[-1], strict=True), color=COLOURS["accent"], **dashes)
    unit = "training, minutes" if cost == "minutes" else "training, counted passes an example"
    axes.set(xlabel=unit, ylabel=f"{attack_of(results, attack)} accuracy, %")
    axes.margins(x=0.1, y=0.2)
    axes.set_xlim(left=0)
    low, high = axes.get_ylim()
    wider = max(0.0, LEAST_SPAN - (high - low)) / 2  # half a point must not look like a cliff
    axes.set_ylim(low - wider, high + wider)
    order = [name for name in (*KINDS, PART, BELOW, FROM_BASELINE) if name in drawn]
    legend(axes, {name: drawn[name] for name in order}, columns=4 if len(drawn) < 5 else 3)
    label(axes, words, lines)
    return [Picture("", _caption(drawn, beside), figure)]


def _sign(marker: str, colour: str, *, hollow: bool = False) -> Any:
    """What a legend shows."""
    from matplotlib.lines import Line2D

    face = "white" if hollow else COLOURS[colour]
    return Line2D([], [], color=COLOURS[colour], marker=marker, markersize=6, markerfacecolor=face, linestyle="none")


def _edge(placed: list[tuple[float, float]]) -> float:
    """Where methods far below the best stand, so that others can be told apart; minus infinity where none has to."""
    best = max(height for height, _ in placed)
    kept = [height - bar for height, bar in placed if height >= best - FAR]
    return min(kept) - 2 if 1 < len(kept) < len(placed) else -math.inf


def _caption(drawn: dict[str, Any], beside: str) -> str:
    text = "What each method reaches, over what its training costs; dashes lead from a baseline to BulletTrain on it"
    text += ", bars are two standard errors, of the images that were judged and of seeds where there are several"
    if PART in drawn:
        text += "; hollow: judged on a part of the test images"
        text += f", and placed by how far it is from {beside} on these" if beside else ""
    if BELOW in drawn:
        text += f"; at the lower edge, with its figure: more than {FAR:.0f} points below the best"
    return f"{text}."


def _placed(points: list[tuple[float, Measured, Row]]) -> tuple[dict[str, tuple[float, float]], str]:
    """Where rows stand, and two standard errors; and the row that those judged on a part of the images stand beside.

    Another part is harder or easier than the whole, for all methods alike: so such a row's place is that of one that
    was judged on all images, and the difference between the two on the images that both have.
    """
    whole = next(((judged, row) for _, judged, row in points if judged.figures and not _is_part(judged)), None)
    placed, beside = {}, ""
    for _, judged, row in points:
        place = judged.mean, 2 * judged.above(Measured((0.0,))).error
        if whole is not None and _is_part(judged) and (apart := judged.above(whole[0])).paired:
            error = math.hypot(apart.error, whole[0].above(Measured((0.0,))).error)
            place, beside = (whole[0].mean + apart.value, 2 * error), whole[1].title
        placed[row.name] = place
    return placed, beside


def _is_part(judged: Measured) -> bool:
    """Whether it is of some of the images alone."""
    return any(figure.get("among") for figure in judged.figures)


def _points(results: Results, attack: str, cost: str) -> list[tuple[float, Measured, Row]]:
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
