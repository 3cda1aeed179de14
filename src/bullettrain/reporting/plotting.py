"""Matplotlib in the style of the report, for figures inside a page or in files."""

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
"""Colours by the name of the CSS variable in the page; ``*-ink`` are dark enough for text."""
WIDTH, HEIGHT = 352.0, 226.0
"""Size of a figure in points: about the width of a phone, so that text stays readable there."""
MAX_CURVE_POINTS = 250
"""Maximum points of a curve, to keep the page small."""
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
"""Style of a line across the whole figure."""


@dataclass(frozen=True)
class Plate:
    """A figure with its title and caption. Create and render it inside :func:`drawing`."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def svg(self) -> str:
        """The figure as an ``<svg>`` element that uses the CSS variables of the page as colours."""
        buffer = io.StringIO()
        self.figure.savefig(buffer, format="svg")
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
        label = html.escape(f"Chart: {self.title}")
        head = f'<svg class="plot" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{label}">'
        text = re.sub(r"<svg\b[^>]*>", lambda _: head, text, count=1)
        # Make ids unique within the page.
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
    """Draw for a file: white background, text as paths."""
    return drawing(**{"svg.fonttype": "path", "figure.facecolor": "white"})


# --------------------------------------------------------------------------------------------------- axes


@dataclass(frozen=True)
class Curve:
    """A line: its colour, a label at its end ({} is its last value), its style, and its name in a legend."""

    x: Floats
    y: Floats
    colour: str
    label: str = ""
    style: str = "-"
    name: str = ""


def panels(*heights: float, columns: int = 1, width: float = 1.0, height: float = 1.0) -> tuple[Figure, list[Axes]]:
    """Create a figure of panels: stacked with a shared x axis, or side by side.

    Args:
        heights: relative heights of stacked panels; by default, one row.
        columns: number of panels side by side.
        width, height: size of the figure, relative to a figure of the report.
    """
    with extra("a figure"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width * WIDTH / 72, height * HEIGHT / 72), layout="constrained")
    ratios = heights or (1.0,)
    grid = figure.subplots(len(ratios), columns, sharex=len(ratios) > 1, squeeze=False, height_ratios=ratios)
    return figure, list(grid.flat)


def draw_lines(axes: Axes, curves: Sequence[Curve], *, percent: bool = False, gap: float = 0.1) -> None:
    """Draw lines with labels at their ends, and a legend of those that have a name.

    Args:
        axes: axes to draw into.
        curves: lines; NaN values are gaps.
        percent: whether values are shares, to be shown in percent.
        gap: minimum distance between labels, relative to the height of the axes.
    """
    named: dict[str, Any] = {}
    for curve in curves:
        known, look = np.isfinite(curve.y), dict[str, Any](color=COLOURS[curve.colour])
        if curve.style == "o" or known.sum() == 1:
            axes.plot(curve.x, curve.y, "o", markersize=5, markeredgecolor=COLOURS["card"], mew=0.6, **look)
        elif curve.style == "--":
            axes.plot(curve.x[known], curve.y[known], linestyle=(0, (4, 2)), linewidth=1.1, alpha=0.8, **look)
        else:
            axes.plot(curve.x, curve.y, "-", linewidth=1.6, **look)
        if curve.name and known.any():
            named[curve.name] = axes.lines[-1]
    if named:
        legend_above(axes, named)
    axes.set_xlim(left=0)
    if percent:
        percent_axis(axes)
    ends = [(last(curve.y), curve) for curve in curves if curve.label]
    scale = 100 if percent else 1
    end_labels(axes, [(y, curve.label.format(scale * y), curve.colour) for y, curve in ends], gap)


def percent_axis(axes: Axes) -> None:
    """Format the y axis in percent, within [0, 1]."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low - 0.03), min(1.0, high + 0.03))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))  # no steps of 2.5 %, which would be rounded
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def epoch_axis(axes: Axes, label: str = "epoch") -> None:
    """Label the x axis, with ticks at whole numbers."""
    axes.locator_params(axis="x", nbins=5, integer=True)
    axes.set_xlabel(label)


def legend_above(axes: Axes, drawn: dict[str, Any], columns: int = 2) -> None:
    """Add a legend above the axes."""
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": columns}
    axes.legend(list(drawn.values()), list(drawn), frameon=False, fontsize=9, handlelength=2, **place)


def end_labels(axes: Axes, labels: Sequence[tuple[float, str, str]], gap: float = 0.1) -> None:
    """Write labels (y, text, colour) at the right end of lines, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    wanted = sorted(((y - low) / (high - low), text, colour) for y, text, colour in labels if np.isfinite(y))
    top = 1.0 - gap * np.arange(len(wanted))[::-1]  # leaves room for the labels above
    place = -np.inf
    for (height, text, colour), highest in zip(wanted, top, strict=True):
        place = max(place + gap, min(height, float(highest)))
        ink = COLOURS.get(f"{colour}-ink", COLOURS[colour])
        style: dict[str, Any] = {"color": ink, "va": "center", "ha": "left", "annotation_clip": False}
        axes.annotate(text, (1.0, place), xytext=(6, 0), xycoords="axes fraction", textcoords="offset points", **style)


def label_points(axes: Axes, words: Sequence[tuple[float, float, str]]) -> None:
    """Write labels (x, y, text) beside their points and off all lines. Call it last."""
    with extra("a figure"):
        from adjustText import adjust_text
    figure: Any = axes.figure
    figure.draw_without_rendering()  # computes the layout
    figure.set_layout_engine("none")
    drawn = [line.get_transform().transform_path(line.get_path()).interpolated(6).vertices for line in axes.lines]
    occupied = axes.transData.inverted().transform(np.concatenate(drawn))
    look: dict[str, Any] = {"fontsize": 8.5, "ha": "center", "color": COLOURS["ink"]}
    texts = [axes.text(x, y, text, **look) for x, y, text in words]
    ties = {"arrowstyle": "-", "color": COLOURS["soft"], "lw": 0.6}
    adjust_text(texts, *occupied.T, ax=axes, expand=(1.2, 1.8), iter_lim=400, arrowprops=ties)


def last(values: Floats) -> float:
    """Return the last finite value; NaN if there is none."""
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else float("nan")


def thin(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Reduce a curve to at most MAX_CURVE_POINTS points by averaging neighbours, ignoring NaN."""
    if len(x) <= MAX_CURVE_POINTS:
        return x, y
    parts = np.array_split(np.ma.masked_invalid([x, y]), MAX_CURVE_POINTS, axis=1)
    means = np.array([part.mean(axis=1).filled(np.nan) for part in parts])
    return means[:, 0], means[:, 1]
