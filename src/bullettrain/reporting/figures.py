"""The report's figures: curves, the paper's figs. 3 to 5, and two runs against the clock.

Each function gives a :class:`Plate`, or None where the run has nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bullettrain.formatting import percent, short
from bullettrain.mining import Category
from bullettrain.reporting.plotting import Curve, end_labels, ink, last, line, panels, percent_axis, thin
from bullettrain.reporting.run import Run
from bullettrain.reporting.svg import COLOURS, drawing, inline
from bullettrain.run_folder import SHARES, Floats, ScoredBatch, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Plate:
    """A figure with its title and one sentence of what to look for."""

    name: str
    title: str
    caption: str
    svg: str


def loss(run: Run) -> Plate | None:
    """Training loss, with the learning rate below it."""
    table = run.progress
    x, y = thin(table["epoch"], table["loss"])
    if not np.isfinite(y).any():
        return None
    rate_x, rate = thin(table["epoch"], table["lr"])
    with drawing():
        figure, axes = panels(3.4, 1) if np.isfinite(rate).any() else panels(1)
        line(axes[0], Curve(x, y, "accent"))
        end_labels(axes[0], [(last(y), short(last(y)), "accent-ink")])
        axes[0].set_xlim(left=0)
        if len(axes) > 1:
            axes[1].fill_between(rate_x, rate, color=COLOURS["soft"], alpha=0.25, linewidth=0)
            line(axes[1], Curve(rate_x, rate, "soft"), width=1.2)
            axes[1].set_ylim(bottom=0)
            highest = float(np.nanmax(table["lr"]))
            axes[1].set_yticks([0, highest], ["0", short(highest)])
            axes[1].set_xlabel("epoch  (below: learning rate)")
        else:
            axes[0].set_xlabel("epoch")
        svg = inline(figure, "loss", "Line chart of the training loss over epochs, with the learning rate below it.")
    caption = "The loss of the training batches, averaged between log entries; it should fall, and fastest where the"
    return Plate("loss", "Training loss", f"{caption} learning rate comes down.", svg)


def accuracy(run: Run, attacked: str) -> Plate | None:
    """Accuracy on clean and on attacked images: training batches, validation set, probe."""
    table, epochs = run.progress, run.epochs
    curves, says = [], []
    at = f" ({run.threat})" if run.threat else ""
    how = "corrupted" if run.makes_views else "attacked"
    for column, colour, label in (("clean_accuracy", "soft", run.seen_as), ("robust_accuracy", "accent", how)):
        curves.append(Curve(*thin(table["epoch"], table[column]), colour, f"training, {label}"))
    if any(np.isfinite(curve.y).any() for curve in curves):
        says.append(
            f"Lines: training batches, as they were {how}{at}"
            + ("" if run.plain else f", some {'as they are' if run.makes_views else 'with fewer steps'}")
        )
    for column, colour, label in (("validation_clean", "soft", "clean"), ("validation_robust", "accent", how)):
        curves.append(Curve(epochs["epoch"], epochs[column], colour, f"validation, {label}", style="o"))
    if any(np.isfinite(curve.y).any() for curve in curves[2:]):
        says.append("dots: validation set" + (f", under PGD-10{at}" if at else ""))
    if np.isfinite(epochs["probe_robust"]).any():
        curves.append(Curve(epochs["epoch"], epochs["probe_robust"], "accent", style="--"))
        says.append(f"dashed: PGD-10{at} on a few training examples, where a fall to zero means collapse")
    if not says:
        return None
    with drawing():
        figure, (axes,) = panels(1)
        for curve in curves:
            line(axes, curve)
        percent_axis(axes)
        axes.set(xlabel="epoch", xlim=(0, None))
        axes.locator_params(axis="x", nbins=5, integer=True)
        ends = [(c.label, c.colour, last(c.y)) for c in curves if c.label and np.isfinite(c.y).any()]
        end_labels(axes, [(y, f"{label} {100 * y:.0f} %", ink(colour)) for label, colour, y in ends])
        label = f"Line chart of accuracy on clean and {attacked} images over epochs."
        svg = inline(figure, "accuracy", label)
    return Plate("accuracy", "Accuracy", "; ".join(says) + ".", svg)


def plate(draw: Callable[[], Figure | None], name: str, title: str, caption: str, label: str) -> Plate | None:
    """The figure that ``draw`` draws, in the report's style; ``label`` says what it shows to whoever cannot see it."""
    with drawing():
        figure = draw()
        return None if figure is None else Plate(name, title, caption, inline(figure, name, label))


def shares(run: Run) -> Plate | None:
    """Shares of outlier, boundary and robust examples over training (the paper's fig. 3)."""
    caption = "What each mini-batch was made of. Robust should grow and outliers shrink; the boundary band is where "
    label = "Stacked areas: shares of outlier, boundary and robust examples over epochs."
    title = "Outlier, boundary, robust over training"
    return plate(lambda: draw_shares(run.progress), "shares", title, f"{caption}most of the work goes.", label)


def draw_shares(table: Table) -> Figure | None:
    """The drawing of :func:`shares`, in the style that is set."""
    known = np.all([(table[name] >= 0) & (table[name] <= 1) for name in SHARES], axis=0)
    if not known.any():
        return None
    heights = {name: thin(table["epoch"][known], table[name][known])[1] for name in SHARES}
    x, _ = thin(table["epoch"][known], table["epoch"][known])
    if len(x) == 1:  # one entry has no width: show it as a flat band
        x, heights = np.array([0.0, x[0]]), {name: np.repeat(height, 2) for name, height in heights.items()}
    figure, (axes,) = panels(1)
    base, ends = np.zeros_like(x), []
    for name in reversed(SHARES):  # robust at the bottom grows, outliers at the top melt away
        top = base + heights[name]
        axes.fill_between(x, base, top, color=COLOURS[name], alpha=0.85, linewidth=0)
        axes.plot(x, top, color=COLOURS["card"], linewidth=1.2)
        ends.append(((base[-1] + top[-1]) / 2, f"{name} {100 * heights[name][-1]:.0f} %", f"{name}-ink"))
        base = top
    axes.set(ylim=(0, 1), xlim=(0, max(x[-1], 1e-3)), xlabel="epoch")
    percent_axis(axes, limits=False)
    end_labels(axes, ends)
    return figure


def svar(run: Run) -> Plate | None:
    """Mean signed prediction variance of the three categories over training (fig. 4)."""
    caption = "Mean signed prediction variance: below zero is misclassified, further up is surer. The three should keep"
    caption += " their order and move apart as training goes on."
    label = "Line chart of the mean signed prediction variance of the three categories over epochs."
    return plate(lambda: draw_svar(run.steps), "svar", "SVar of the three classes", caption, label)


def draw_svar(table: Table, over: str = "epoch") -> Figure | None:
    """The drawing of :func:`svar`, in the style that is set; ``over`` "epoch" or "step"."""
    curves = [
        Curve(*thin(table[over], table[f"svar_{name}"]), name, name)
        for name in SHARES
        if np.isfinite(table[f"svar_{name}"]).any()
    ]
    if not curves:
        return None
    figure, (axes,) = panels(1)
    axes.axhline(0, color=COLOURS["soft"], linewidth=0.9, linestyle=(0, (3, 3)))
    for curve in curves:
        line(axes, curve)
    axes.set(xlabel="iteration" if over == "step" else over, ylabel="mean SVar", xlim=(0, None))
    end_labels(axes, [(last(curve.y), curve.label, ink(curve.colour)) for curve in curves])
    return figure


def histogram(batch: ScoredBatch) -> Plate | None:
    """Signed prediction variance of one batch, with the steps it was given (fig. 5a)."""
    when = f" in epoch {int(np.ceil(batch.epoch))}" if np.isfinite(batch.epoch) else ""
    caption = f"The last whole batch{when}, {len(batch.svar)} examples. Below zero is misclassified; the line above is"
    label = "Histogram of the signed prediction variance of one batch, coloured by category, with the steps above."
    caption += " the steps given at each SVar."
    return plate(lambda: draw_histogram(batch), "histogram", "One batch, by SVar", caption, label)


def draw_histogram(batch: ScoredBatch) -> Figure:
    """The drawing of :func:`histogram`, in the style that is set."""
    low, high = min(float(batch.svar.min()), 0.0), max(float(batch.svar.max()), 0.0)
    high = max(high, low + 1e-6)
    width = (high - low) / 26
    edges = np.arange(np.floor(low / width), np.ceil(high / width) + 1) * width  # zero is always an edge
    order = np.argsort(batch.svar, kind="stable")
    figure, (top, axes) = panels(1, 2.4)
    within = np.clip(batch.svar, edges[0], edges[-1])  # the last edge may miss the largest by a rounding error
    groups = [within[batch.category == category] for category in Category]
    colours = [COLOURS[name] for name in SHARES]
    axes.hist(groups, bins=list(edges), stacked=True, color=colours, edgecolor=COLOURS["card"], linewidth=0.8)
    axes.axvline(0, color=COLOURS["soft"], linewidth=0.9, linestyle=(0, (3, 3)))
    axes.set(xlabel="signed prediction variance (SVar)", ylabel="examples")
    axes.locator_params(axis="y", integer=True)
    axes.locator_params(axis="x", nbins=6)
    top.step(batch.svar[order], batch.steps[order], where="mid", color=COLOURS["soft"], linewidth=2.2)
    most = max(int(batch.steps.max()), 1)
    top.set(ylim=(-0.12 * most, 1.75 * most), ylabel="steps")
    top.set_yticks([0, most])
    span = high - low
    named = {
        category: (float(np.median(group)), int(batch.steps[batch.category == category].max()))
        for category, group in zip(Category, groups, strict=True)
        if len(group) and float(np.ptp(group)) > 0.16 * span  # a narrow range has no room for its name
    }
    for name, category in zip(SHARES, Category, strict=True):
        if category in named:
            middle, height = named[category]
            beside = np.abs(batch.svar - middle) < 0.085 * span  # half a name
            above = max(height, int(batch.steps[beside].max(initial=0)))
            others = [place for other, place in named.items() if other != category]
            if not any(top == above and abs(at - middle) < 0.17 * span for at, top in others):  # else names would meet
                height = above
            place: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 10.5, "textcoords": "offset points"}
            top.annotate(name, (middle, height), xytext=(0, 3), color=COLOURS[f"{name}-ink"], **place)
    return figure


def allocation(batch: ScoredBatch) -> Plate | None:
    """Steps of one batch against the rank of its examples by signed prediction variance (fig. 5b)."""
    most = max(int(batch.steps.max()), 1)
    spent = percent(float(batch.steps.sum()) / (most * len(batch.steps)), 0)
    caption = f"The filled area is what this batch cost: {spent} of the dashed box, where every example would get"
    label = "Steps given to each example of one batch, ordered by signed prediction variance."
    caption += f" {most} step{'s' * (most > 1)}."
    return plate(lambda: draw_allocation(batch), "allocation", "Where the steps went", caption, label)


def draw_allocation(batch: ScoredBatch) -> Figure:
    """The drawing of :func:`allocation`, in the style that is set."""
    order = np.argsort(batch.svar, kind="stable")
    steps, category = batch.steps[order], batch.category[order]
    edges = np.arange(len(steps) + 1) / len(steps)
    most = max(int(steps.max()), 1)
    figure, (axes,) = panels(1)
    for name, member in zip(SHARES, Category, strict=True):
        given = np.where(category == member, steps, 0)
        axes.stairs(given, edges, fill=True, color=COLOURS[name], alpha=0.85, linewidth=0)
    axes.stairs(steps, edges, color=COLOURS["soft"], linewidth=2.0, baseline=None)
    axes.plot([0, 0, 1, 1], [0, most, most, 0], color=COLOURS["soft"], linewidth=1.1, linestyle=(0, (4, 3)))
    for name, member in zip(SHARES, Category, strict=True):
        at = np.flatnonzero(category == member)
        if len(at) > 0.13 * len(steps):
            height = float(steps[at].mean())
            words = f"{name}\n{height:.3g} step{'s' * (height != 1)}"
            place: dict[str, Any] = {"ha": "center", "va": "bottom", "linespacing": 1.35, "fontsize": 10.5}
            x, y = (at.mean() + 0.5) / len(steps), height + 0.035 * most
            axes.text(x, y, words, color=COLOURS[f"{name}-ink"], **place)
    axes.set(xlim=(0, 1), ylim=(0, 1.32 * most), xlabel="examples, ordered by SVar", ylabel="steps")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    counts = np.unique([0, *steps])
    axes.set_yticks(counts if len(counts) <= 5 else np.unique(np.linspace(0, most, 5).round()))
    return figure


RACED = {
    "validation_robust": "accuracy on the validation set, under PGD-10",
    "probe_robust": "accuracy on a few training examples, under PGD-10",
    "robust_accuracy": "accuracy on the attacked training batches, which flatters BulletTrain: it attacks some less",
}


def race(bullettrain: Run, baseline: Run) -> list[Plate]:
    """Robust accuracy of both runs against the clock and against epochs, by the best measure both have."""
    runs = (baseline.epochs, bullettrain.epochs)
    column = next((name for name in RACED if all(np.isfinite(table[name]).any() for table in runs)), None)
    if column is None:
        return []
    plates = []
    measure = RACED[column] + (f" ({bullettrain.threat})" if bullettrain.threat else "")
    if bullettrain.makes_views:
        measure = measure.replace("under PGD-10", "on AugMix views")
    clocks = [np.cumsum(np.nan_to_num(table["seconds"])) for table in runs]
    latest = max(clock[-1] for clock in clocks)
    unit, scale = ("s", 1) if latest < 180 else ("min", 60) if latest < 10800 else ("h", 3600)
    if latest > 0:
        caption = f"Both runs by their training time: {measure}. Further left at the same height is faster."
        x = [clock / scale for clock in clocks]
        plates.append(_race("race-clock", "Against the clock", caption, f"training time ({unit})", x, runs, column))
    caption = f"The same by epoch: {measure}. Lines on top of each other mean that the saved steps cost nothing."
    x = [table["epoch"] for table in runs]
    plates.append(_race("race-epoch", "Epoch by epoch", caption, "epoch", x, runs, column))
    return plates


def _race(
    name: str, title: str, caption: str, label: str, x: Sequence[Floats], runs: Sequence[Table], column: str
) -> Plate:
    with drawing():
        figure, (axes,) = panels(1)
        ends = []
        for at, table, colour, word in zip(x, runs, ("soft", "accent"), ("baseline", "BulletTrain"), strict=True):
            curve = Curve(*thin(at, table[column]), colour, word)
            line(axes, curve)
            here = np.flatnonzero(np.isfinite(curve.y))[-1]
            axes.plot(curve.x[here], curve.y[here], "o", color=COLOURS[colour], markersize=6)
            ends.append((last(curve.y), f"{word}\n{100 * last(curve.y):.1f} %", ink(colour)))
        axes.set(xlabel=label, xlim=(0, None))
        percent_axis(axes)
        end_labels(axes, ends, gap=0.19)
        svg = inline(figure, name, f"Line chart of robust accuracy of BulletTrain and the baseline by {label}.")
    return Plate(name, title, caption, svg)
