"""The report's figures: curves, the paper's figs. 3 to 5, two runs against the clock, and how a network was evaluated.

Each function gives a :class:`Plate`, or None where there is nothing to draw. What is drawn of the paper's figures can
also stand in a file of its own; ``draw_*`` draw in the style that is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bullettrain.evaluation.results import Entry, Result
from bullettrain.evaluation.specs import radius, threat_in_words
from bullettrain.formatting import attack_name, number, percent, short
from bullettrain.mining import Category
from bullettrain.reporting.plotting import (
    COLOURS,
    Curve,
    drawing,
    end_labels,
    ink,
    inline,
    last,
    legend_above,
    line,
    mark,
    panels,
    percent_axis,
    thin,
)
from bullettrain.reporting.run import Run
from bullettrain.run_folder import SHARES, Floats, ScoredBatch, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CLASSES = 12
"""More than these have no room in one figure: the weakest are shown."""


@dataclass(frozen=True)
class Plate:
    """A figure with its title and one sentence of what to look for."""

    name: str
    title: str
    caption: str
    svg: str


def plate(draw: Callable[[], Figure | None], name: str, title: str, caption: str, label: str) -> Plate | None:
    """The figure that ``draw`` draws, in the report's style; ``label`` says what it shows to whoever cannot see it."""
    with drawing():
        figure = draw()
        return None if figure is None else Plate(name, title, caption, inline(figure, name, label))


# ----------------------------------------------------------------------------------------------- of a run


def loss(run: Run) -> Plate | None:
    """Training loss, with the learning rate below it."""
    table = run.progress
    x, y = thin(table["epoch"], table["loss"])
    rate_x, rate = thin(table["epoch"], table["lr"])

    def draw() -> Figure | None:
        if not np.isfinite(y).any():
            return None
        figure, axes = panels(3.4, 1) if np.isfinite(rate).any() else panels(1)
        line(axes[0], Curve(x, y, "accent"))
        end_labels(axes[0], [(last(y), short(last(y)), "accent-ink")])
        axes[0].set_xlim(left=0)
        axes[-1].set_xlabel("epoch")
        if len(axes) > 1:
            axes[1].fill_between(rate_x, rate, color=COLOURS["soft"], alpha=0.25, linewidth=0)
            line(axes[1], Curve(rate_x, rate, "soft"), width=1.2)
            axes[1].set_ylim(bottom=0)
            highest = float(np.nanmax(table["lr"]))
            axes[1].set_yticks([0, highest], ["0", short(highest)])
            axes[1].set_xlabel("epoch  (below: learning rate)")
        return figure

    caption = "The loss of the training batches, averaged between log entries. It should fall, and fastest where the "
    caption += "learning rate comes down."
    label = "Line chart of the training loss over epochs, with the learning rate below it."
    return plate(draw, "loss", "Training loss", caption, label)


def accuracy(run: Run) -> Plate | None:
    """Accuracy on clean and on attacked images: training batches, validation set, probe."""
    table, epochs = run.progress, run.epochs
    at = f" ({run.threat})" if run.threat else ""
    how = "corrupted" if run.makes_views else "attacked"
    columns = (("clean_accuracy", "soft", run.seen_as), ("robust_accuracy", "accent", how))
    training = [
        Curve(*thin(table["epoch"], table[name]), colour, f"training, {word}") for name, colour, word in columns
    ]
    held_out = (("validation_clean", "soft", "clean"), ("validation_robust", "accent", how))
    validation = [Curve(epochs["epoch"], epochs[n], c, f"validation, {word}", style="o") for n, c, word in held_out]
    probe = [Curve(epochs["epoch"], epochs["probe_robust"], "accent", style="--")]
    fewer = "" if run.plain else f", some {'as they are' if run.makes_views else 'with fewer steps'}"
    says = {
        f"Lines: training batches, as they were {how}{at}{fewer}": training,
        "dots: validation set" + (f", under PGD-10{at}" if at else ""): validation,
        f"dashed: PGD-10{at} on a few training examples, where a fall to zero means collapse": probe,
    }
    known = {text: curves for text, curves in says.items() if any(np.isfinite(curve.y).any() for curve in curves)}
    curves = [curve for group in known.values() for curve in group]

    def draw() -> Figure | None:
        if not curves:
            return None
        figure, (axes,) = panels(1)
        for curve in curves:
            line(axes, curve)
        percent_axis(axes)
        axes.set(xlabel="epoch", xlim=(0, None))
        axes.locator_params(axis="x", nbins=5, integer=True)
        ends = [(last(curve.y), curve) for curve in curves if curve.label]
        end_labels(axes, [(y, f"{curve.label} {100 * y:.0f} %", ink(curve.colour)) for y, curve in ends])
        return figure

    label = f"Line chart of accuracy on clean and {how} images over epochs."
    return plate(draw, "accuracy", "Accuracy", "; ".join(known) + ".", label)


def shares(run: Run) -> Plate | None:
    """Shares of outlier, boundary and robust examples over training (the paper's fig. 3)."""
    caption = "What each mini-batch was made of. Robust should grow and outliers shrink; the boundary band is where "
    label = "Stacked areas: shares of outlier, boundary and robust examples over epochs."
    title = "Outlier, boundary, robust over training"
    return plate(lambda: draw_shares(run.progress), "shares", title, f"{caption}most of the work goes.", label)


def draw_shares(table: Table) -> Figure | None:
    """The drawing of :func:`shares`."""
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
    """The drawing of :func:`svar`; ``over`` "epoch" or "step"."""
    known = [name for name in SHARES if np.isfinite(table[f"svar_{name}"]).any()]
    if not known:
        return None
    figure, (axes,) = panels(1)
    mark(axes, y=0)
    curves = [Curve(*thin(table[over], table[f"svar_{name}"]), name, name) for name in known]
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
    """The drawing of :func:`histogram`."""
    low, high = min(float(batch.svar.min()), 0.0), max(float(batch.svar.max()), 0.0)
    width = max(high - low, 1e-6) / 26
    edges = np.arange(np.floor(low / width), np.ceil(high / width) + 1) * width  # zero is always an edge
    order = np.argsort(batch.svar, kind="stable")
    figure, (top, axes) = panels(1, 2.4)
    within = np.clip(batch.svar, edges[0], edges[-1])  # the last edge may miss the largest by a rounding error
    groups = [within[batch.category == category] for category in Category]
    look: dict[str, Any] = {"edgecolor": COLOURS["card"], "linewidth": 0.8, "stacked": True}
    bars: Any = axes.hist(groups, bins=list(edges), color=[COLOURS[name] for name in SHARES], **look)[2]
    mark(axes, x=0)
    axes.set(xlabel="signed prediction variance (SVar)", ylabel="examples")
    axes.locator_params(axis="y", integer=True)
    axes.locator_params(axis="x", nbins=6)
    legend_above(top, dict(zip(SHARES, bars, strict=True)), columns=3)
    top.step(batch.svar[order], batch.steps[order], where="mid", color=COLOURS["soft"], linewidth=2.2)
    most = max(int(batch.steps.max()), 1)
    top.set(ylim=(-0.15 * most, 1.2 * most), ylabel="steps")
    top.set_yticks([0, most])
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
    """The drawing of :func:`allocation`."""
    order = np.argsort(batch.svar, kind="stable")
    steps, category = batch.steps[order], batch.category[order]
    edges = np.arange(len(steps) + 1) / len(steps)
    most = max(int(steps.max()), 1)
    figure, (axes,) = panels(1)
    for name, member in zip(SHARES, Category, strict=True):
        given = np.where(category == member, steps, 0)
        axes.stairs(given, edges, fill=True, color=COLOURS[name], alpha=0.85, linewidth=0)
        at = np.flatnonzero(category == member)
        if len(at) > 0.13 * len(steps):
            height = float(steps[at].mean())
            words = f"{name}\n{height:.3g} step{'s' * (height != 1)}"
            place: dict[str, Any] = {"ha": "center", "va": "bottom", "linespacing": 1.35, "fontsize": 10.5}
            x, y = (at.mean() + 0.5) / len(steps), height + 0.035 * most
            axes.text(x, y, words, color=COLOURS[f"{name}-ink"], **place)
    axes.stairs(steps, edges, color=COLOURS["soft"], linewidth=2.0, baseline=None)
    axes.plot([0, 0, 1, 1], [0, most, most, 0], color=COLOURS["soft"], linewidth=1.1, linestyle=(0, (4, 3)))
    axes.set(xlim=(0, 1), ylim=(0, 1.32 * most), xlabel="examples, ordered by SVar", ylabel="steps")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    counts = np.unique([0, *steps])
    axes.set_yticks(counts if len(counts) <= 5 else np.unique(np.linspace(0, most, 5).round()))
    return figure


# --------------------------------------------------------------------------------------- of two runs

RACED = {
    "validation_robust": "accuracy on the validation set, under PGD-10",
    "probe_robust": "accuracy on a few training examples, under PGD-10",
    "robust_accuracy": "accuracy on the attacked training batches, which flatters BulletTrain: it attacks some less",
}


def race(bullettrain: Run, baseline: Run) -> list[Plate | None]:
    """Robust accuracy of both runs against the clock and against epochs, by the best measure both have."""
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

    def draw(x: Sequence[Floats], xlabel: str) -> Figure:
        figure, (axes,) = panels(1)
        ends = []
        for at, table, colour, word in zip(x, runs, ("soft", "accent"), ("baseline", "BulletTrain"), strict=True):
            curve = Curve(*thin(at, table[column]), colour, word)
            line(axes, curve)
            here = np.flatnonzero(np.isfinite(curve.y))[-1]
            axes.plot(curve.x[here], curve.y[here], "o", color=COLOURS[colour], markersize=6)
            ends.append((last(curve.y), f"{word}\n{100 * last(curve.y):.1f} %", ink(colour)))
        axes.set(xlabel=xlabel, xlim=(0, None))
        percent_axis(axes)
        end_labels(axes, ends, gap=0.19)
        return figure

    clock, epoch = [time / scale for time in clocks], [table["epoch"] for table in runs]
    label = "Line chart of robust accuracy of BulletTrain and the baseline"
    by_clock = f"Both runs by their training time: {measure}. Further left at the same height is faster."
    by_epoch = f"The same by epoch: {measure}. Lines on top of each other mean that the saved steps cost nothing."
    drawn = (partial(draw, clock, f"training time ({unit})"), partial(draw, epoch, "epoch"))
    return [
        plate(drawn[0], "race-clock", "Against the clock", by_clock, f"{label} over time.") if latest > 0 else None,
        plate(drawn[1], "race-epoch", "Epoch by epoch", by_epoch, f"{label} over epochs."),
    ]


# ------------------------------------------------------------------------------------ of an evaluation


def eps_curve(entry: Entry, name: str) -> Plate | None:
    """Accuracy against ε, with as many steps each."""
    swept = _swept(entry, "steps")
    clean = [r for r in entry.results if r.role == "curve" and r.attack["attack"] == "clean"]
    if not swept or not clean:
        return None
    largest = max(result.attack["eps"] for result in swept)
    bounded = [result for result in swept if result.attack["eps"] < largest]
    eps = np.array([0.0, *(result.attack["eps"] for result in bounded)])
    at = [result.attack["eps"] for result in _swept(entry, "eps")[:1]]
    xlabel = f"ε  ({'L∞' if swept[0].attack['norm'] == 'linf' else 'L2'})"
    steps, free = swept[0].attack["steps"], next(r for r in swept if r.attack["eps"] == largest)
    caption = (
        f"PGD-{steps} on {number(swept[0].examples, 0)} images; the band is the 95 % interval, the dashed "
        f"line the ε of the attacks above. It should fall all the way: without bounds (ε = {radius(largest)}) "
        f"{percent(free.accuracy)} are left."
    )
    label = "Line chart of accuracy against the radius of the attack."
    draw = partial(_draw_sweep, [clean[0], *bounded], eps, xlabel, at=at)
    return plate(draw, f"{name}-eps", "Robust accuracy against ε", caption, label)


def steps_curve(entry: Entry, name: str) -> Plate | None:
    """Accuracy against steps, at one ε."""
    swept = _swept(entry, "eps")
    if not swept:
        return None
    steps = np.array([float(result.attack["steps"]) for result in swept])
    caption = (
        f"PGD at {threat_in_words(*(swept[0].threat or ('linf', 0.0)))}, the same "
        f"{number(swept[0].examples, 0)} images. It should fall and level off; a rise is a sign of masked gradients."
    )
    label = "Line chart of robust accuracy against the steps of the attack."
    draw = partial(_draw_sweep, swept, steps, "attack steps", log=True)
    return plate(draw, f"{name}-steps", "Robust accuracy against steps", caption, label)


def _swept(entry: Entry, held: str) -> list[Result]:
    """The points of a curve: those PGD results that agree on ``held``, where most do, ordered by the other."""
    other = "eps" if held == "steps" else "steps"
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in entry.results:
        if result.role == "curve" and result.attack["attack"] == "pgd":
            key = (result.precision, result.examples, result.attack["norm"], result.attack[held])
            groups.setdefault(key, []).append(result)
    largest = max(groups.values(), key=len, default=[])
    return sorted(largest, key=lambda result: float(result.attack[other])) if len(largest) > 2 else []


def _draw_sweep(
    results: Sequence[Result], x: Floats, xlabel: str, *, log: bool = False, at: Sequence[float] = ()
) -> Figure:
    """One line with its interval; a dashed line across at each of ``at``."""
    y = np.array([result.accuracy for result in results])
    low, high = (np.array([result.interval[end] for result in results]) for end in (0, 1))
    figure, (axes,) = panels(1)
    for place in at:
        mark(axes, x=place)
    axes.fill_between(x, low, high, color=COLOURS["accent"], alpha=0.16, linewidth=0)
    for style in ("-", "o"):
        line(axes, Curve(x, y, "accent", style=style))
    if log:
        axes.set_xscale("log")
        axes.set_xticks(list(x), [f"{value:.0f}" for value in x])
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
    axes.set(xlabel=xlabel)
    percent_axis(axes)
    end_labels(axes, [(float(y[-1]), f"{100 * y[-1]:.1f} %", "accent-ink")])
    return figure


def classes(entry: Entry, attacks: Sequence[Result], name: str) -> Plate | None:
    """Accuracy of each class, clean and under the attack that breaks most."""
    clean = next((r for r in attacks if r.attack["attack"] == "clean" and r.per_class), None)
    attacked = [r for r in attacks if r.threat and r.per_class]
    if clean is None or not attacked:
        return None
    worst = min(attacked, key=lambda result: result.accuracy)
    weakest = sorted(range(len(worst.per_class)), key=lambda i: worst.per_class[i] or 0.0)
    shown = sorted([i for i in weakest if worst.per_class[i] is not None][:MOST_CLASSES])
    names = [entry.classes[i] if len(entry.classes[i]) <= 12 else f"{entry.classes[i][:11]}…" for i in shown]
    pale, dark = ([result.per_class[i] or 0.0 for i in shown] for result in (clean, worst))

    def draw() -> Figure:
        places = np.arange(len(shown))[::-1]
        figure, (axes,) = panels(1)
        axes.grid(visible=False)
        axes.barh(places, pale, height=0.82, color=COLOURS["soft"], alpha=0.28)
        axes.barh(places, dark, height=0.82, color=COLOURS["accent"], alpha=0.9)
        for place, clean_share, share in zip(places, pale, dark, strict=True):
            text = f"{100 * share:.0f} / {100 * clean_share:.0f}"
            axes.text(1.02, place, text, va="center", ha="left", fontsize=9.5, color=COLOURS["soft"], clip_on=False)
        axes.set_yticks(list(places), names)
        axes.set(xlim=(0, 1))
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        return figure

    under = f"{attack_name(worst.name)} ({threat_in_words(*(worst.threat or ('linf', 0.0)))})"
    cut = len(worst.per_class) > len(shown) == MOST_CLASSES
    which = f"The {MOST_CLASSES} weakest of {len(entry.classes)} classes" if cut else "Each class"
    caption = f"{which}: dark is under {under}, pale is clean; the numbers are both, in percent."
    label = "Bars of the accuracy of each class, clean and under attack."
    return plate(draw, f"{name}-classes", "Accuracy by class", caption, label)
