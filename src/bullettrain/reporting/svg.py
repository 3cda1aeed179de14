"""Figures drawn by matplotlib, as SVG that lives inside a page: its colours and fonts are the page's own.

A figure is drawn in stand-in colours. Each is replaced by a CSS variable, so that one drawing follows light and dark.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bullettrain.extras import extra

if TYPE_CHECKING:
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


@contextmanager
def drawing() -> Iterator[None]:
    """Draw in the report's style; matplotlib's settings are the caller's again afterwards."""
    with extra("a report"):
        import matplotlib
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "bullettrain",
        "font.size": 11.0,
        "text.color": COLOURS["ink"],
        "axes.edgecolor": COLOURS["line"],
        "axes.labelcolor": COLOURS["soft"],
        "axes.labelsize": 10.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "grid.color": COLOURS["line"],
        "grid.linewidth": 0.8,
        "xtick.color": COLOURS["line"],
        "ytick.color": COLOURS["line"],
        "xtick.labelcolor": COLOURS["soft"],
        "ytick.labelcolor": COLOURS["soft"],
        "xtick.labelsize": 10.5,
        "ytick.labelsize": 10.5,
        "ytick.major.size": 0.0,
        "lines.linewidth": 1.9,
        "lines.solid_capstyle": "round",
        "savefig.facecolor": "none",
        "savefig.edgecolor": "none",
    }
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
