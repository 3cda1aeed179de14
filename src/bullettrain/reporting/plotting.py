"""How figures are drawn: matplotlib in the report's style, as SVG inside a page or as files of their own.

Inside a page a figure is drawn in stand-in colours. Each is replaced by a CSS variable, so that one drawing follows
light and dark.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bullettrain.extras import extra
from bullettrain.run_folder import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_VARIABLES = (
    *("ink", "soft", "line", "card", "accent", "outlier", "boundary", "robust"),
    *("accent-ink", "outlier-ink", "boundary-ink", "robust-ink"),
)
COLOURS = {name: f"#fa1{index:01x}7e" for index, name in enumerate(_VARIABLES)}
"""Stand-ins, by the name of the CSS variable each becomes. ``*-ink`` are the same hues, dark enough for text."""
PRINT = {
    **{"ink": "#1a1f29", "soft": "#59626f", "line": "#d5d9df", "card": "#ffffff", "accent": "#0f8278"},
    **{"outlier": "#c2276f", "boundary": "#d28500", "robust": "#2f6fd0", "accent-ink": "#0f766e"},
    **{"outlier-ink": "#b01f63", "boundary-ink": "#8f5600", "robust-ink": "#2259b5"},
}
"""The report's colours on white, for a picture that stands alone."""
WIDTH, HEIGHT = 352.0, 226.0
"""A figure's size in its own units: near a phone's width, so that 11-unit text stays readable there."""
POINTS = 250
"""Most points of a curve: what a screen shows, and what keeps the page small."""


@contextmanager
def drawing() -> Iterator[None]:
    """Draw in the report's style; matplotlib's settings are the caller's again afterwards."""
    with extra("a figure"):
        import matplotlib
    sides = {f"axes.spines.{side}": False for side in ("top", "right", "left")}
    lines = dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), COLOURS["line"])
    words = dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), COLOURS["soft"])
    sizes = dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize"), 10.5)
    clear = dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor", "savefig.edgecolor"), "none")
    grid = {"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.linewidth": 0.8}
    style: dict[Any, Any] = {**sides, **lines, **words, **sizes, **clear, **grid, "font.size": 11.0}
    style |= {"svg.fonttype": "none", "svg.hashsalt": "bullettrain", "text.color": COLOURS["ink"]}
    style |= {"ytick.major.size": 0.0, "lines.linewidth": 1.9, "lines.solid_capstyle": "round"}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own style sheet is for their figures, not for this page
        matplotlib.rcParams.update(style)
        yield


@contextmanager
def printed() -> Iterator[None]:
    """Draw in :data:`PRINT` colours instead of stand-ins, with letters as outlines: for files of their own."""
    before = dict(COLOURS)
    COLOURS.update(PRINT)
    try:
        with drawing():
            import matplotlib

            matplotlib.rcParams.update({"svg.fonttype": "path", "figure.facecolor": "white"})
            yield
    finally:
        COLOURS.update(before)


def inline(figure: Figure, name: str, label: str) -> str:
    """The figure as an ``<svg>`` for a page: no namespaces, metadata or fixed size; ids begin with ``name``."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    head = f'<svg class="plot" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{html.escape(label)}">'
    text = re.sub(r"<svg\b[^>]*>", lambda _: head, text, count=1)
    # Two figures of one page must not share ids: matplotlib numbers each figure's from one.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = text.replace("url(#", f"url(#{name}-").replace('xlink:href="#', f'href="#{name}-')
    text = re.sub(r"font: ([^;\"]*?px) [^;\"]*", r"font: \1 var(--font)", text)
    text = re.sub(r' d="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), text)
    for variable, stand_in in COLOURS.items():
        text = text.replace(stand_in, f"var(--{variable})")
    return re.sub(r"\n\s*", "\n", text).strip()


# ------------------------------------------------------------------------------------------- on the canvas


@dataclass(frozen=True)
class Curve:
    """One line: where it runs, its colour, the word at its end, and how it is drawn."""

    x: Floats
    y: Floats
    colour: str
    label: str = ""
    style: str = "-"


def panels(*heights: float, columns: int = 1, width: float = 1.0, height: float = 1.0) -> tuple[Figure, list[Axes]]:
    """A figure of panels: under each other, of these heights and with one x axis, or side by side.

    Args:
        width, height: of the whole, in units of a figure of the report.
    """
    with extra("a figure"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width * WIDTH / 72, height * HEIGHT / 72), layout="constrained")
    ratios = heights or (1.0,)
    grid = figure.subplots(len(ratios), columns, sharex=len(ratios) > 1, squeeze=False, height_ratios=ratios)
    return figure, list(grid.flat)


def line(axes: Axes, curve: Curve, width: float = 1.6) -> None:
    """Draw a curve in its style; a single point is a dot, and a gap, where the value was not a number, stays one."""
    known = np.isfinite(curve.y)
    if curve.style == "o" or known.sum() == 1:
        look: dict[str, Any] = {"marker": "o", "linestyle": "none", "markeredgecolor": COLOURS["card"], "mew": 0.6}
        axes.plot(curve.x, curve.y, color=COLOURS[curve.colour], markersize=3.6 if curve.style == "o" else 5, **look)
    elif curve.style == "--":
        dashed: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.1, "alpha": 0.8}
        axes.plot(curve.x[known], curve.y[known], color=COLOURS[curve.colour], **dashed)
    else:
        axes.plot(curve.x, curve.y, "-", color=COLOURS[curve.colour], linewidth=width)


def mark(axes: Axes, *, x: float | None = None, y: float | None = None) -> None:
    """A dashed line across, at ``x`` or at ``y``."""
    look: dict[str, Any] = {"color": COLOURS["soft"], "linewidth": 0.9, "linestyle": (0, (3, 3))}
    if x is not None:
        axes.axvline(x, **look)
    if y is not None:
        axes.axhline(y, **look)


def percent_axis(axes: Axes, *, limits: bool = True) -> None:
    """Label fractions as percentages, within sensible limits."""
    from matplotlib.ticker import MaxNLocator

    if limits:
        low, high = axes.get_ylim()
        low, high = max(low, -0.02), min(high, 1.02)
        axes.set_ylim((low, high) if high - low > 0.1 else (max(0.0, low - 0.05), min(1.02, high + 0.05)))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))  # steps of 2.5 % would be rounded
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def legend_above(axes: Axes, drawn: dict[str, Any], columns: int = 2) -> None:
    """Above the axes, where it covers nothing."""
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": columns}
    axes.legend(list(drawn.values()), list(drawn), frameon=False, fontsize=9, handlelength=2, **place)


def end_labels(axes: Axes, labels: list[tuple[float, str, str]], gap: float = 0.1) -> None:
    """Words at the right end of the lines, moved apart where they would overlap: (height, text, colour)."""
    low, high = axes.get_ylim()
    wanted = sorted(((y - low) / (high - low), text, colour) for y, text, colour in labels if np.isfinite(y))
    top = 1.0 - gap * np.arange(len(wanted))[::-1]  # the highest that leaves room above
    place = -np.inf
    for (height, text, colour), highest in zip(wanted, top, strict=True):
        place = max(place + gap, min(height, float(highest)))
        style: dict[str, Any] = {"color": COLOURS[colour], "va": "center", "ha": "left", "annotation_clip": False}
        axes.annotate(text, (1.0, place), xytext=(6, 0), xycoords="axes fraction", textcoords="offset points", **style)


def label_points(axes: Axes, words: Sequence[tuple[float, float, str]]) -> None:
    """Write words (x, y, text) beside their points into ``axes``, which are finished otherwise; off all lines."""
    with extra("a figure"):
        from adjustText import adjust_text
    figure: Any = axes.figure
    figure.draw_without_rendering()  # only now everything has its place
    figure.set_layout_engine("none")
    drawn = [line.get_transform().transform_path(line.get_path()).interpolated(6).vertices for line in axes.lines]
    taken = axes.transData.inverted().transform(np.concatenate(drawn))
    look: dict[str, Any] = {"fontsize": 8.5, "ha": "center", "color": COLOURS["ink"]}
    texts = [axes.text(x, y, text, **look) for x, y, text in words]
    ties = {"arrowstyle": "-", "color": COLOURS["soft"], "lw": 0.6}
    adjust_text(texts, *taken.T, ax=axes, expand=(1.2, 1.8), iter_lim=400, arrowprops=ties)


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
