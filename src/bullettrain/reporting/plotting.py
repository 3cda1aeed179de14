"""How figures are drawn: matplotlib in the report's style, inside a page or as files of their own."""

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

COLOURS = {
    **{"ink": "#1a1f29", "soft": "#59626f", "line": "#d5d9df", "card": "#ffffff", "accent": "#0f8278"},
    **{"outlier": "#c2276f", "boundary": "#d28500", "robust": "#2f6fd0", "accent-ink": "#0f766e"},
    **{"outlier-ink": "#b01f63", "boundary-ink": "#8f5600", "robust-ink": "#2259b5"},
}
"""All colours of a figure, by the name of the page's CSS variable; ``*-ink`` are dark enough for text."""
WIDTH, HEIGHT = 352.0, 226.0
"""A figure's size in its own units: near a phone's width, so that 11-unit text stays readable there."""
POINTS = 250
"""Most points of a curve: what a screen shows, and what keeps the page small."""
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), COLOURS["line"]),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), COLOURS["soft"]),
    **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize"), 10.5),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor", "savefig.edgecolor"), "none"),
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.linewidth": 0.8, "font.size": 11.0},
    **{"svg.fonttype": "none", "svg.hashsalt": "bullettrain", "text.color": COLOURS["ink"]},
    **{"ytick.major.size": 0.0, "lines.linewidth": 1.9, "lines.solid_capstyle": "round"},
}
DASHED: dict[str, Any] = {"color": COLOURS["soft"], "linewidth": 0.9, "linestyle": (0, (3, 3))}
"""Of a line across the whole figure."""


@dataclass(frozen=True)
class Plate:
    """A figure with its title and one sentence of what to look for; drawn and shown inside :func:`drawing`."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def svg(self) -> str:
        """The figure as an ``<svg>`` for a page, whose colours are the page's CSS variables."""
        buffer = io.StringIO()
        self.figure.savefig(buffer, format="svg")
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
        label = html.escape(f"Chart: {self.title}")
        head = f'<svg class="plot" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{label}">'
        text = re.sub(r"<svg\b[^>]*>", lambda _: head, text, count=1)
        # Two figures of one page must not share ids: matplotlib numbers each figure's from one.
        text = re.sub(r'\bid="', f'id="{self.name}-', text)
        text = text.replace("url(#", f"url(#{self.name}-").replace('xlink:href="#', f'href="#{self.name}-')
        text = re.sub(r"font: ([^;\"]*?px) [^;\"]*", r"font: \1 var(--font)", text)
        text = re.sub(r' d="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), text)
        for variable, colour in COLOURS.items():
            text = text.replace(colour, f"var(--{variable})")
        return re.sub(r"\n\s*", "\n", text).strip()


@contextmanager
def drawing(**settings: Any) -> Iterator[None]:
    """Draw in the report's style; matplotlib's settings are the caller's again afterwards."""
    with extra("a figure"):
        import matplotlib
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own style sheet is for their figures, not for this page
        matplotlib.rcParams.update(STYLE | settings)
        yield


def printed() -> Any:
    """Draw for a file of its own: on white, with letters as outlines."""
    return drawing(**{"svg.fonttype": "path", "figure.facecolor": "white"})


# ------------------------------------------------------------------------------------------- on the canvas


@dataclass(frozen=True)
class Curve:
    """One line: where it runs, its colour, what stands at its end ({} for its last value), and how it is drawn."""

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


def draw_lines(axes: Axes, curves: Sequence[Curve], *, percent: bool = False, gap: float = 0.1) -> None:
    """Lines with their names at their ends.

    Args:
        percent: whether heights are shares.
        gap: between names, as a share of the height.
    """
    for curve in curves:
        known, look = np.isfinite(curve.y), dict[str, Any](color=COLOURS[curve.colour])
        if curve.style == "o" or known.sum() == 1:
            size = 3.6 if curve.style == "o" else 5
            axes.plot(curve.x, curve.y, "o", markersize=size, markeredgecolor=COLOURS["card"], mew=0.6, **look)
        elif curve.style == "--":
            axes.plot(curve.x[known], curve.y[known], linestyle=(0, (4, 2)), linewidth=1.1, alpha=0.8, **look)
        else:
            axes.plot(curve.x, curve.y, "-", linewidth=1.6, **look)
    axes.set_xlim(left=0)
    if percent:
        percent_axis(axes)
    ends = [(last(curve.y), curve) for curve in curves if curve.label]
    scale = 100 if percent else 1
    end_labels(axes, [(y, curve.label.format(scale * y), curve.colour) for y, curve in ends], gap)


def percent_axis(axes: Axes) -> None:
    """Label fractions as percentages, within sensible limits."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low - 0.03), min(1.0, high + 0.03))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))  # steps of 2.5 % would be rounded
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def legend_above(axes: Axes, drawn: dict[str, Any], columns: int = 2) -> None:
    """Above the axes, where it covers nothing."""
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": columns}
    axes.legend(list(drawn.values()), list(drawn), frameon=False, fontsize=9, handlelength=2, **place)


def end_labels(axes: Axes, labels: Sequence[tuple[float, str, str]], gap: float = 0.1) -> None:
    """Words at the right end of the lines, moved apart where they would overlap: (height, text, colour)."""
    low, high = axes.get_ylim()
    wanted = sorted(((y - low) / (high - low), text, colour) for y, text, colour in labels if np.isfinite(y))
    top = 1.0 - gap * np.arange(len(wanted))[::-1]  # the highest that leaves room above
    place = -np.inf
    for (height, text, colour), highest in zip(wanted, top, strict=True):
        place = max(place + gap, min(height, float(highest)))
        ink = COLOURS.get(f"{colour}-ink", COLOURS[colour])
        style: dict[str, Any] = {"color": ink, "va": "center", "ha": "left", "annotation_clip": False}
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


def last(values: Floats) -> float:
    """The last finite value, NaN where there is none."""
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else float("nan")


def thin(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """At most POINTS points: the mean of each run of neighbours, NaN only where all of them are."""
    if len(x) <= POINTS:
        return x, y
    parts = np.array_split(np.ma.masked_invalid([x, y]), POINTS, axis=1)
    means = np.array([part.mean(axis=1).filled(np.nan) for part in parts])
    return means[:, 0], means[:, 1]
