"""The report's numbers: headline, speed-ups, shares and tables, as text ready to be shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bullettrain.formatting import (
    DASH,
    MOMENT,
    captures,
    duration,
    error_in_words,
    in_all,
    listed,
    number,
    percent,
    plural,
    points,
    short,
    times,
    too_close,
)
from bullettrain.reporting.paper import paper_boundary
from bullettrain.reporting.run import Comparison, Run
from bullettrain.run_folder import SHARES, preferred

ROWS = 400  # the longest table of epochs that is written out
NAN = math.nan


@dataclass(frozen=True)
class Card:
    """A figure of the headline: its value, what it is, a line of small print, and what it was computed from."""

    value: str
    name: str
    note: str
    formula: str = ""


@dataclass(frozen=True)
class Share:
    """One category's part of the average batch."""

    name: str
    percent: str
    width: str
    note: str


@dataclass(frozen=True)
class Grid:
    """A table as text."""

    head: list[str]
    rows: list[list[str]]
    note: str = ""


def outcome(run: Run, comparison: Comparison | None) -> str:
    """The outcome in one or two sentences; empty where nothing was evaluated."""
    if comparison is not None:
        mine, plain = _rows(comparison)
        text = f"Trained in {duration(mine.get('seconds', NAN))} with BulletTrain"
        text += f" and in {duration(plain.get('seconds', NAN))} without"
        clock = comparison.speedup.get("wall_clock", NAN)
        text += f": {times(clock)} by the clock." if math.isfinite(clock) else "."
        changes = {attack: _gap(mine, plain, attack) for attack in comparison.attacks}
        parts = []
        for attack, gap in changes.items():
            error = comparison.errors.get(attack, NAN)
            if math.isfinite(gap):
                parts.append(f"{points(gap, error=error)} {_against(run, attack)}{too_close(gap, error)}")
        return f"{text} Accuracy changed by {listed(parts)}." if parts else text
    reached = {e.attack: e.accuracy for e in run.evaluations if e.weights == headline_weights(run, comparison)}
    if not reached:
        return ""
    says = listed([f"{percent(accuracy)} {_against(run, attack)}" for attack, accuracy in reached.items()])
    return f"{says}, after {duration(run.seconds)} of training."


def headline_weights(run: Run, comparison: Comparison | None) -> str:
    """The weights that the headline speaks of: the comparison's, else the best where they were kept, else the last."""
    if comparison is not None and "bullettrain" in comparison.weights:
        return comparison.weights["bullettrain"]
    return preferred({evaluation.weights for evaluation in run.evaluations})


def headline(run: Run, comparison: Comparison | None) -> list[Card]:
    """Accuracy, time and throughput, each beside the baseline's where there is one."""
    weights = headline_weights(run, comparison)
    robust = "views" if run.makes_views else "pgd20"
    attacks = dict.fromkeys(["clean", robust, *(e.attack for e in run.evaluations if e.weights == weights)])
    plain = _rows(comparison)[1] if comparison else {}
    cards = [_accuracy_card(run, weights, attack, plain.get(attack, NAN)) for attack in attacks]
    epochs = len(run.epochs["epoch"])
    note = f"{epochs} {plural('epoch', epochs)}"
    if math.isfinite(plain.get("seconds", NAN)):
        note = f"baseline {duration(plain['seconds'])}"
    note += captures(run.capture_seconds, "; compiling and capturing: {} more")
    cards.append(Card(duration(run.seconds), "Training time" if run.ended else "Training time so far", note))
    rates = run.epochs["examples_per_second"]
    if np.isfinite(rates).any():
        cards.append(Card(number(float(np.nanmedian(rates)), 0), "Examples a second", "median over epochs"))
    return [card for card in cards if card is not None]


def _accuracy_card(run: Run, weights: str, attack: str, baseline: float) -> Card | None:
    """Test accuracy, or the latest on the validation set where the test set has not been used yet."""
    tested = run.accuracy(weights, attack)
    if math.isfinite(tested):
        beside = f"baseline {percent(baseline)}, {points(tested - baseline)}" if math.isfinite(baseline) else ""
        note = f"test set, {weights} weights" + (f"; {beside}" if beside else "")
        return Card(percent(tested), f"{run.attack_name(attack)} accuracy", note)
    column, name = {
        "clean": ("validation_clean", "Clean"),
        "pgd20": ("validation_robust", run.attack_name("pgd10")),
        "views": ("validation_robust", run.attack_name("views")),
    }.get(attack, ("", ""))
    if not column or not np.isfinite(run.epochs[column]).any():
        return None
    latest = run.epochs[column][np.isfinite(run.epochs[column])][-1]
    return Card(percent(float(latest)), f"{name} accuracy", "validation set, latest epoch")


def speedups(run: Run, comparison: Comparison | None) -> list[Card]:
    """The three speed-ups, each with what it means; never one for another."""
    measured = comparison.speedup if comparison else {}
    theoretical = measured.get("theoretical", run.totals["theoretical_speedup"])
    work, clock = measured.get("work", run.totals["work_speedup"]), measured.get("wall_clock", NAN)
    formula = "The paper’s formula, from the measured shares: steps of the plain algorithm against those taken, "
    formula += "plus one on either side for the update."
    if run.makes_views:
        formula = "The paper’s formula, from the measured share: an image and two views of it, against two views of "
        formula += "boundary examples alone."
    passes = "Every pass counted: forward, backward to the input and backward to the weights are one each."
    wall = "Seconds of this training against seconds of the same recipe without mining, on the same device."
    if clock < 1:
        wall += " Below 1×, mining cost more time than it saved."
    if comparison is not None:
        wall = f"{wall} {in_all(*_rows(comparison))}".strip()
    if run.ended is None:
        formula, passes = (f"{text} Known when the run ends." for text in (formula, passes))
    taken = run.average("work")
    counted = f"{number(taken, 1)} passes an example" if math.isfinite(taken) else ""
    if counted and math.isfinite(run.totals["plain_work"]):
        counted += f", {number(run.totals['plain_work'], 1)} without mining"
    cards = [
        Card(times(theoretical), "Theoretical", formula, _formula(run) if math.isfinite(theoretical) else ""),
        Card(times(work), "Work", passes, counted),
    ]
    return [*cards, Card(times(clock), "Wall-clock", wall)] if math.isfinite(clock) else cards


def _formula(run: Run) -> str:
    """The paper's formula with this run's own numbers."""
    share = {name: run.average(name) for name in SHARES}
    if len(run.budget) != len(SHARES) or not all(math.isfinite(value) for value in share.values()):
        return ""
    if run.makes_views:
        return f"3 / (1 + 2·{share['boundary']:.3f})"
    terms = [f"{share[name]:.3f}·{run.budget[name]}" for name in ("boundary", "robust", "outlier") if run.budget[name]]
    return f"({max(run.budget.values())} + 1) / ({' + '.join([*terms, '1'])})"


def shares(run: Run) -> list[Share]:
    """Average shares of the three categories; empty where nothing was mined."""
    found = {name: run.average(name) for name in SHARES}
    if run.plain or not all(math.isfinite(value) and value >= 0 for value in found.values()):
        return []
    notes = {name: f"{count} {plural('step', count)} each" for name, count in run.budget.items()}
    if run.makes_views:
        more = "more " if run.seen_as == "as views" else ""
        notes = {name: f"two {more}views each" if count else f"no {more}views" for name, count in run.budget.items()}
    paper = paper_boundary(str(run.config.get("recipe")))
    if paper is not None:
        notes["boundary"] = f"{notes.get('boundary', '')}; {percent(paper, 0)} in the paper"
    return [Share(name, percent(value, 0), f"{100 * value:.2f}", notes.get(name, "")) for name, value in found.items()]


def evaluations(run: Run) -> Grid:
    """All test accuracies: a row for each set of weights, a column for each attack."""
    attacks = list(dict.fromkeys(evaluation.attack for evaluation in run.evaluations))
    weights = list(dict.fromkeys(evaluation.weights for evaluation in run.evaluations))
    rows = [[name, *(percent(run.accuracy(name, attack), 2) for attack in attacks)] for name in weights]
    sizes = {evaluation.examples for evaluation in run.evaluations if math.isfinite(evaluation.examples)}
    note = f", on {number(sizes.pop(), 0)} test examples" if len(sizes) == 1 else ""
    for precision in sorted({e.precision for e in run.evaluations} - {"float32"}):
        note += f"; attacks searched in {precision}, judged in float32"
    return Grid(["Weights", *map(run.attack_name, attacks)], rows, note)


def beside_baseline(comparison: Comparison) -> Grid:
    """Baseline, BulletTrain and the difference, in a row for each figure."""
    mine, plain = _rows(comparison)
    rows = []
    for attack in comparison.attacks:
        pair = [percent(row.get(attack, NAN), 2) for row in (plain, mine)]
        error = comparison.errors.get(attack, NAN)
        rows.append(
            [
                f"{comparison.bullettrain.attack_name(attack)} accuracy",
                *pair,
                points(_gap(mine, plain, attack), 2, error),
            ]
        )
    ratio = {key: times(comparison.speedup.get(key, NAN)) for key in ("wall_clock", "work")}
    rows.append(["Training time", *(duration(row.get("seconds", NAN)) for row in (plain, mine)), ratio["wall_clock"]])
    captured = [row.get("capture_seconds", 0.0) for row in (plain, mine)]
    if sum(captured) > MOMENT:
        rows.append(["Compiling and capturing", *map(duration, captured), DASH])
    rows.append(["Passes an example", *(number(row.get("work", NAN), 1) for row in (plain, mine)), ratio["work"]])
    kept = comparison.weights.get("bullettrain")
    note = f" Test accuracy of the {kept} weights." if kept else ""
    return Grid(["", "Baseline", "BulletTrain", "Change"], rows, note + _error_note(comparison))


def epochs(run: Run) -> Grid:
    """The table of epochs, without the columns in which nothing was logged."""
    at = f" ({run.threat})" if run.threat else ""
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "epoch": ("Epoch", lambda value: number(value, 0)),
        "seconds": ("Time", duration),
        "examples_per_second": ("Examples/s", lambda value: number(value, 0)),
        "loss": ("Loss", lambda value: number(value, 3)),
        "lr": ("LR", short),
        "clean_accuracy": (f"{run.seen_as.capitalize()}, training", percent),
        "robust_accuracy": ("Corrupted, training" if run.makes_views else f"Attacked{at}, training", percent),
        "validation_clean": ("Clean, validation", percent),
        "validation_robust": ("Corrupted, validation" if run.makes_views else f"PGD-10{at}, validation", percent),
        "probe_robust": (f"PGD-10{at}, a few training images", percent),
        **{name: (name.capitalize(), lambda value: percent(value, 0)) for name in SHARES if not run.plain},
        "work": ("Passes", lambda value: number(value, 1)),
    }
    used = {name: column for name, column in columns.items() if np.isfinite(run.epochs[name]).any()}
    count = len(run.epochs["epoch"])
    first = max(0, count - ROWS)
    rows = [[words(float(run.epochs[name][i])) for name, (_, words) in used.items()] for i in range(first, count)]
    return Grid(
        [title for title, _ in used.values()], rows, f"The first {first} are in metrics.jsonl." if first else ""
    )


def _rows(comparison: Comparison) -> tuple[dict[str, float], dict[str, float]]:
    """The comparison's figures: BulletTrain's, the baseline's."""
    return comparison.rows.get("bullettrain", {}), comparison.rows.get("baseline", {})


def _error_note(comparison: Comparison) -> str:
    """What a ± is, where there is one."""
    return f" {error_in_words(comparison.paired)}." if comparison.errors else ""


def _against(run: Run, attack: str) -> str:
    return {"clean": "on clean images", "views": "on AugMix views"}.get(attack, f"against {run.attack_name(attack)}")


def _gap(mine: dict[str, float], plain: dict[str, float], key: str) -> float:
    return mine.get(key, NAN) - plain.get(key, NAN)
