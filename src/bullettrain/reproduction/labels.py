"""Words beside points: each at the nearest place inside the axes where it covers no point, line or other word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bullettrain.reporting.svg import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
"""Boxes are rows of left, bottom, right, top. All lengths are typographic points."""
Line = tuple[tuple[float, float], tuple[float, float]]

SIZE = 8.5
MARK = 4.0
"""Half a side of the square around a point that stays free."""
MARGIN = 1.5
"""What stays free around a word."""
SPACE = 7.0
"""What stays free between two words on a line beside that, so that they do not read as one."""
NEAR = 9.0
"""A word that is further from its point, or nearly as close to another, is tied to its own by a thin line."""
STEP = 3.0
"""How finely places are tried."""
TRIED = 1000
"""Free places of a word that are tried for a line that crosses nothing."""


@dataclass(frozen=True)
class Word:
    """A text, the point that it belongs to, and its colour."""

    x: float
    y: float
    text: str
    colour: str


def label(axes: Axes, words: Sequence[Word], lines: Sequence[Line]) -> None:
    """Write ``words`` into ``axes``, which are finished otherwise; ``lines`` are those to be left uncovered."""
    if not words:
        return
    figure: Any = axes.figure
    figure.draw_without_rendering()  # only now everything has its place
    unit = 72 / figure.dpi
    frame = axes.bbox.get_points() * unit
    points = axes.transData.transform([(word.x, word.y) for word in words]) * unit
    halves = [_size(axes, word.text) * unit / 2 + MARGIN for word in words]
    places = [_places(points, index, half, frame) for index, half in enumerate(halves)]
    marks = _box(points, MARK)
    thin = np.concatenate([np.empty((0, 4)), *(_along(*axes.transData.transform(line) * unit) for line in lines)])

    def choice(index: int) -> int:
        centres, tied = places[index]
        return int((~_meet(_box(centres[~tied], halves[index]), marks, thin)).sum())

    found: list[tuple[int, Floats, bool]] = []
    written = np.empty((0, 4))
    for index in sorted(range(len(words)), key=choice):  # those that have least choice first
        point, half, (centres, tied) = points[index], halves[index], places[index]
        free = np.flatnonzero(~_meet(_box(centres, half), marks, thin, written))[:TRIED]
        ways = [(centres[i], _tie(point, centres[i], half) if tied[i] else thin[:0]) for i in free]
        others = marks[~_meet(marks, marks[[index]])]
        clear = (way for way in ways if not _meet(way[1], others, written).any())
        above = (point + np.array([0, MARK + half[1]]), thin[:0])
        centre, tie = next(chain(clear, ways), above)
        written = np.concatenate([written, _box(centre[None], half + np.array([SPACE, 0]))])
        thin = np.concatenate([thin, tie])
        found.append((index, centre - point, len(tie) > 0))
    for index, offset, has_tie in reversed(found):  # a line that had to cross a word is below it
        _write(axes, words[index], offset, halves[index], tied=has_tie)


def _places(points: Floats, index: int, half: Floats, frame: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Centres of a point's word inside ``frame``, best first, and whether the word has to be tied to it there."""
    point = points[index]
    low, high = np.ceil((frame[0] + half - point) / STEP), np.floor((frame[1] - half - point) / STEP)
    steps = np.meshgrid(*(np.arange(first, last + 1) for first, last in zip(low, high, strict=True)))
    centres = point + STEP * np.stack([direction.ravel() for direction in steps], axis=1)
    gaps = np.linalg.norm(np.maximum(np.abs(centres[:, None] - points) - half, 0), axis=2)
    own, other = gaps[:, index], np.delete(gaps, index, axis=1).min(axis=1, initial=np.inf)
    tied = (own > NEAR) | (other < own + MARK)
    across, up = (centres - point).T
    order = np.argsort(own + 0.05 * np.abs(across) + 0.5 * (up < 0) + NEAR * tied, kind="stable")
    return centres[order], tied[order]


def _tie(point: Floats, centre: Floats, half: Floats) -> Floats:
    """The line from a point to the nearest of a word's edges."""
    return _along(point, np.clip(point, centre - half, centre + half))


def _size(axes: Axes, text: str) -> Floats:
    """Width and height in pixels."""
    note = axes.text(0, 0, text, fontsize=SIZE)
    size = np.array(note.get_window_extent().size)
    note.remove()
    return size


def _write(axes: Axes, word: Word, offset: Floats, half: Floats, *, tied: bool) -> None:
    nearest = np.clip(-offset / half, -1, 1) / 2 + 0.5
    tie = {"arrowstyle": "-", "color": word.colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3, "relpos": nearest}
    axes.annotate(
        word.text,
        (word.x, word.y),
        tuple(offset),
        textcoords="offset points",
        ha="center",
        va="center",
        color=word.colour,
        fontsize=SIZE,
        bbox={"facecolor": COLOURS["card"], "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
        arrowprops=tie if tied else None,
    )


def _box(centres: Floats, half: Floats | float) -> Floats:
    return np.concatenate([centres - half, centres + half], axis=1)


def _along(start: Floats, stop: Floats) -> Floats:
    """A line as small boxes."""
    return _box(np.linspace(start, stop, int(np.hypot(*(stop - start)) / 2) + 2), 1.0)


def _meet(boxes: Floats, *others: Floats) -> NDArray[np.bool_]:
    """Which of ``boxes`` overlap any of ``others``."""
    left, bottom, right, top = np.concatenate(others).T
    across = (boxes[:, :1] < right) & (boxes[:, 2:3] > left)
    met: NDArray[np.bool_] = (across & (boxes[:, 1:2] < top) & (boxes[:, 3:] > bottom)).any(axis=1)
    return met
