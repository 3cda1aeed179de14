"""What the reproduction's pictures are drawn on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bullettrain.extras import extra
from bullettrain.reporting.svg import HEIGHT, WIDTH
from bullettrain.reporting.words import attack_name
from bullettrain.reproduction.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"N_B": "$N_B$", "N_O": "$N_O$", "N_R": "$N_R$"}


@dataclass(frozen=True)
class Picture:
    """A figure, what is added to the study's name for its file, and what it shows."""

    suffix: str
    caption: str
    figure: Figure


def canvas(width: float = 1.0, height: float = 1.0, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side, in units of the report's."""
    with extra("a figure"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width * WIDTH / 72, height * HEIGHT / 72), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def legend(axes: Axes, drawn: dict[str, Any], columns: int = 2) -> None:
    """Above the axes, where it covers nothing."""
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": columns}
    axes.legend(list(drawn.values()), list(drawn), frameon=False, fontsize=9, handlelength=3, **place)


def attack_of(results: Results, metric: str) -> str:
    """The name of the attack that a study's metric is of."""
    return attack_name(results.metric(metric))
