"""Figures of training: curves, the paper's figures 3 to 5, and two runs against time.

Each function returns a :class:`Plate`, or None if there is no data. Call them inside :func:`drawing`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bullettrain.formatting import percent, plural, short
from bullettrain.mining import Category
from bullettrain.reporting.plotting import (
    COLOURS,
    DASHED,
    Curve,
    Plate,
    draw_lines,
    end_labels,
    epoch_axis,
    legend_above,
    panels,
    percent_axis,
    thin,
)
from bullettrain.reporting.run import Run
from bullettrain.run_folder import SHARES, Floats, ScoredBatch, Table


def loss(run: Run) -> Plate | None:
    """Plot the training loss, with the learning rate below it."""
    table = run.progress
    curve = Curve(*thin(table["epoch"], table["loss"]), "accent", "{:.4g}")
    if not np.isfinite(curve.y).any():
        return None
    epoch, rate = thin(table["epoch"], table["lr"])
    figure, axes = panels(3.4, 1) if np.isfinite(rate).any() else panels()
    draw_lines(axes[0], [curve])
    axes[0].set_ylabel("loss")
    if len(axes) > 1:
        axes[1].fill_between(epoch, rate, color=COLOURS["soft"], alpha=0.25, linewidth=0)
        draw_lines(axes[1], [Curve(epoch, rate, "soft")])
        highest = float(np.nanmax(table["lr"]))
        axes[1].set(ylim=(0, None), ylabel="LR")
        axes[1].set_yticks([0, highest], ["0", short(highest)])
        figure.align_ylabels()
    epoch_axis(axes[-1])
    caption = "Loss of the training batches. It should fall, fastest when the learning rate (LR, below) drops."
    return Plate("loss", "Training loss", caption, figure)


def accuracy(run: Run) -> Plate | None:
    """Plot accuracy on clean and on attacked images: training batches, validation set, probe."""
    table, epochs = run.progress, run.epochs
    at = f" ({run.threat})" if run.threat else ""
    how, end = "corrupted" if run.makes_views else "attacked", "{:.0f} %"
    fewer = "" if run.plain else f", some {'as they are' if run.makes_views else 'with fewer steps'}"
    groups = {
        f"Lines: training batches, as they were {how}{at}{fewer}": [
            Curve(*thin(table["epoch"], table["clean_accuracy"]), "soft", end, name=f"training, {run.seen_as}"),
            Curve(*thin(table["epoch"], table["robust_accuracy"]), "accent", end, name=f"training, {how}"),
        ],
        "dots: validation set" + (f", under PGD-10{at}" if at else ""): [
            Curve(epochs["epoch"], epochs["validation_clean"], "soft", end, "o", "validation, clean"),
            Curve(epochs["epoch"], epochs["validation_robust"], "accent", end, "o", f"validation, {how}"),
        ],
        f"dashed: PGD-10{at} on a few training examples, where a fall to zero means collapse": [
            Curve(epochs["epoch"], epochs["probe_robust"], "accent", style="--", name="probe for collapse")
        ],
    }
    groups = {text: curves for text, curves in groups.items() if any(np.isfinite(curve.y).any() for curve in curves)}
    if not groups:
        return None
    figure, (axes,) = panels()
    draw_lines(axes, [curve for curves in groups.values() for curve in curves], percent=True)
    epoch_axis(axes)
    return Plate("accuracy", "Accuracy", "; ".join(groups) + ".", figure)


def shares(table: Table) -> Plate | None:
    """Plot the shares of outlier, boundary and robust examples over training (the paper's figure 3)."""
    known = np.all([(table[name] >= 0) & (table[name] <= 1) for name in SHARES], axis=0)
    if not known.any():
        return None
    heights = {name: thin(table["epoch"][known], table[name][known])[1] for name in SHARES}
    x, _ = thin(table["epoch"][known], table["epoch"][known])
    if len(x) == 1:  # draw a single entry as a flat band
        x, heights = np.array([0.0, x[0]]), {name: np.repeat(height, 2) for name, height in heights.items()}
    figure, (axes,) = panels()
    names = SHARES[::-1]  # robust examples at the bottom
    look: dict[str, Any] = {"colors": [COLOURS[name] for name in names], "edgecolor": COLOURS["card"]}
    axes.stackplot(x, [heights[name] for name in names], alpha=0.85, linewidth=1.2, **look)
    percent_axis(axes)
    axes.set(ylim=(0, 1), xlim=(0, max(x[-1], 1e-3)))
    epoch_axis(axes)
    ends = np.array([heights[name][-1] for name in names])
    labels = [f"{name} {100 * end:.0f} %" for name, end in zip(names, ends, strict=True)]
    end_labels(axes, list(zip(np.cumsum(ends) - ends / 2, labels, names, strict=True)))
    caption = "The robust share should grow and the outlier share shrink. Boundary examples get most of the work."
    return Plate("shares", "Outlier, boundary, robust over training", caption, figure)


def svar(table: Table, over: str = "epoch") -> Plate | None:
    """Plot the mean signed prediction variance of the categories (figure 4) over "epoch" or "step"."""
    curves = [Curve(*thin(table[over], table[f"svar_{name}"]), name, name) for name in SHARES]
    if not any(np.isfinite(curve.y).any() for curve in curves):
        return None
    figure, (axes,) = panels()
    axes.axhline(0, **DASHED)
    draw_lines(axes, curves)
    epoch_axis(axes, "iteration" if over == "step" else over)
    axes.set_ylabel("mean SVar")
    caption = "Negative is misclassified, larger is more confident. The three should move apart during training."
    return Plate("svar", "SVar of the three categories", caption, figure)


def histogram(batch: ScoredBatch) -> Plate:
    """Plot the signed prediction variance of one batch, with its attack steps (figure 5a)."""
    low, high = min(float(batch.svar.min()), 0.0), max(float(batch.svar.max()), 0.0)
    width = max(high - low, 1e-6) / 26
    edges = np.arange(np.floor(low / width), np.ceil(high / width) + 1) * width  # zero is always an edge
    order = np.argsort(batch.svar, kind="stable")
    figure, (top, axes) = panels(1, 2.4)
    within = np.clip(batch.svar, edges[0], edges[-1])  # rounding may put the maximum beyond the last edge
    groups = [within[batch.category == category] for category in Category]
    look: dict[str, Any] = {"edgecolor": COLOURS["card"], "linewidth": 0.8, "stacked": True}
    bars: Any = axes.hist(groups, bins=list(edges), color=[COLOURS[name] for name in SHARES], **look)[2]
    axes.axvline(0, **DASHED)
    axes.set(xlabel="signed prediction variance (SVar)", ylabel="examples")
    axes.locator_params(axis="y", integer=True)
    axes.locator_params(axis="x", nbins=6)
    legend_above(top, dict(zip(SHARES, bars, strict=True)), columns=3)
    top.step(batch.svar[order], batch.steps[order], where="mid", color=COLOURS["soft"], linewidth=2.2)
    most = max(int(batch.steps.max()), 1)
    top.set(ylim=(-0.15 * most, 1.2 * most), ylabel="steps", yticks=[0, most])
    when = f" in epoch {int(np.ceil(batch.epoch))}" if np.isfinite(batch.epoch) else ""
    caption = f"The last full batch{when}, {len(batch.svar)} examples: attack steps at each SVar, and a histogram."
    return Plate("histogram", "One batch, by SVar", caption, figure)


def allocation(batch: ScoredBatch) -> Plate:
    """Plot the steps of one batch against the rank of its examples by signed prediction variance (figure 5b)."""
    order = np.argsort(batch.svar, kind="stable")
    steps, category = batch.steps[order], batch.category[order]
    edges = np.arange(len(steps) + 1) / len(steps)
    most = max(int(steps.max()), 1)
    figure, (axes,) = panels()
    for name, member in zip(SHARES, Category, strict=True):
        height = np.where(category == member, steps, 0)
        axes.stairs(height, edges, fill=True, color=COLOURS[name], alpha=0.85, linewidth=0)
        at = np.flatnonzero(category == member)
        if len(at) > 0.13 * len(steps):
            mean = float(steps[at].mean())
            label = f"{name}\n{mean:.3g} step{'s' * (mean != 1)}"
            place: dict[str, Any] = {"ha": "center", "va": "bottom", "linespacing": 1.35, "fontsize": 10.5}
            x, y = (at.mean() + 0.5) / len(steps), mean + 0.035 * most
            axes.text(x, y, label, color=COLOURS[f"{name}-ink"], **place)
    axes.stairs(steps, edges, color=COLOURS["soft"], linewidth=2.0, baseline=None)
    axes.plot([0, 0, 1, 1], [0, most, most, 0], color=COLOURS["soft"], linewidth=1.1, linestyle=(0, (4, 3)))
    axes.set(xlim=(0, 1), ylim=(0, 1.32 * most), xlabel="examples, ordered by SVar", ylabel="steps")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    counts = np.unique([0, *steps])
    axes.set_yticks(counts if len(counts) <= 5 else np.unique(np.linspace(0, most, 5).round()))
    spent = percent(float(steps.sum()) / (most * len(steps)), 0)
    caption = f"This batch cost {spent} of the dashed box, in which every example gets {most} {plural('step', most)}."
    return Plate("allocation", "Where the steps went", caption, figure)


RACED = {
    "validation_robust": "accuracy on the validation set, under PGD-10",
    "probe_robust": "accuracy on a few training examples, under PGD-10",
    "robust_accuracy": "accuracy on the attacked training batches, which flatters BulletTrain: it attacks some less",
}


def race(bullettrain: Run, baseline: Run) -> list[Plate]:
    """Plot the robust accuracy of both runs against time and against epochs, by the best measure that both have."""
    runs = (baseline.epochs, bullettrain.epochs)
    column = next((name for name in RACED if all(np.isfinite(table[name]).any() for table in runs)), None)
    if column is None:
        return []
    measure = RACED[column] + (f" ({bullettrain.threat})" if bullettrain.threat else "")
    if bullettrain.makes_views:
        measure = measure.replace("under PGD-10", "on AugMix views")
    clocks = [np.cumsum(np.nan_to_num(table["seconds"])) for table in runs]
    latest = max(clock[-1] for clock in clocks)
    unit, scale = ("s", 1) if latest < 180 else ("min", 60) if latest < 10800 else ("h", 3600)

    def plate(name: str, title: str, caption: str, xlabel: str, x: list[Floats]) -> Plate:
        curves = []
        for at, table, colour, word in zip(x, runs, ("soft", "accent"), ("baseline", "BulletTrain"), strict=True):
            curves.append(Curve(*thin(at, table[column]), colour, f"{word}\n{{:.1f}} %"))
        figure, (axes,) = panels()
        draw_lines(axes, curves, percent=True, gap=0.19)
        if xlabel == "epoch":
            epoch_axis(axes)
        axes.set_xlabel(xlabel)
        for curve in curves:
            end = np.flatnonzero(np.isfinite(curve.y))[-1]
            axes.plot(curve.x[end], curve.y[end], "o", color=COLOURS[curve.colour], markersize=6)
        return Plate(name, title, caption, figure)

    by_clock = f"Both runs by training time: {measure}. Further left at the same height is faster."
    by_epoch = f"The same by epoch: {measure}. If the lines coincide, saving steps cost no accuracy."
    clock, epoch = [time / scale for time in clocks], [table["epoch"] for table in runs]
    plates = [plate("race-clock", "By training time", by_clock, f"training time ({unit})", clock)] if latest > 0 else []
    return [*plates, plate("race-epoch", "By epoch", by_epoch, "epoch", epoch)]
