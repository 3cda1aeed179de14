"""The top of a report: facts of the run, its outcome, and headline figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bullettrain import formatting as fmt
from bullettrain.config.methods import method_name
from bullettrain.evaluation.results import Entry, Result, wilson
from bullettrain.reporting.paper import paper_boundary
from bullettrain.reporting.plotting import last
from bullettrain.reporting.run import Comparison, Numbers, Run
from bullettrain.run_folder import SHARES, preferred
from bullettrain.run_folder.log import Evaluation

NAN = math.nan
FEW_IMAGES = 1000
"""Below this number of test images a headline figure is shown with its 95 % interval."""


@dataclass(frozen=True)
class Card:
    """A headline figure with a line of small print."""

    value: str
    name: str
    note: str


def title(folder: Path) -> str:
    """Return the title of the page: the name of the folder, for a part of a comparison with its parent."""
    path = folder.resolve()
    return f"{path.parent.name}/{path.name}" if path.name in ("bullettrain", "baseline") else path.name


def facts(run: Run) -> list[str]:
    """Return recipe, method, threat, network, dataset and device."""
    recipe, method = str(run.config.get("recipe") or ""), method_name(run.section("method"))
    names = (("network", "name"), ("data", "name"), ("environment", "device"))
    candidates = [
        f"recipe {recipe}" if recipe not in ("", title(run.folder)) else "",
        f"{method} with BulletTrain" if method and not run.plain else method,
        run.threat.replace(" ", ", ε = "),
        *(str(run.section(section).get(key) or "") for section, key in names),
    ]
    return [fact for fact in candidates if fact]


def reached(run: Run) -> str:
    """Return how far the run has got: ``epoch 12 of 30, step 4 680``."""
    log = run.progress
    if not len(log["step"]):
        return "its start: nothing is logged yet"
    done = max([*run.epochs["epoch"][-1:], *log["epoch"][-1:]])
    planned = run.section("training").get("epochs", run.section("schedule").get("epochs"))
    of = f" of {planned}" if isinstance(planned, int | float) else ""
    return f"epoch {fmt.short(round(float(done), 1))}{of}, step {fmt.number(float(log['step'][-1]), 0)}"


def alerts(run: Run) -> list[str]:
    """Return warnings and notes of the run, losses that are not finite, and files that could not be read."""
    steps: dict[str, list[float]] = {}
    for step, message in run.warnings:
        steps.setdefault(message, []).append(step)
    messages = []
    for message, at in steps.items():
        where = f"Step {fmt.number(at[0], 0)}: " if math.isfinite(at[0]) else ""
        messages.append(f"{where}{message}" + (f" ({len(at)} times)" if len(at) > 1 else ""))
    lost = np.flatnonzero(~np.isfinite(run.progress["loss"]))
    if len(lost):
        entries, first = len(run.progress["loss"]), fmt.number(float(run.progress["step"][lost[0]]), 0)
        where = f"{len(lost)} of {entries} log entries, first at step {first}"
        messages.append(f"The loss was not a finite number in {where}.")
    return [*messages, *run.notes]


# ----------------------------------------------------------------------------------------------- accuracy


def strongest(run: Run, weights: str) -> tuple[Entry, Result] | None:
    """Return the result of AutoAttack at the threat of training, of ``weights`` if possible.

    Without AutoAttack, return an attack that is stronger than the one at the end of training, on no fewer images.
    """
    method, own = run.section("method"), {e.weights: e for e in run.evaluations if e.attack != "clean"}
    threat = (method.get("norm"), method.get("eps"))
    attacks = [(e, r) for e in run.entries for r in e.results if r.role == "attack" and r.threat == threat]
    if automatic := [pair for pair in attacks if pair[1].attack["attack"] == "autoattack"]:
        return max(automatic, key=lambda pair: (pair[0].weights == weights, pair[1].examples))
    stronger = [
        (entry, result)
        for entry, result in attacks
        if (before := own.get(entry.weights)) is not None
        if result.examples >= before.examples and result.accuracy < before.accuracy
    ]
    return min(stronger, key=lambda pair: pair[1].accuracy, default=None)


def chosen_weights(run: Run, comparison: Comparison | None) -> str:
    """Return the weights of the headline: the comparison's, else the best if there are any, else the last."""
    return (comparison.weights if comparison else "") or preferred({e.weights for e in run.evaluations})


def outcome(run: Run, comparison: Comparison | None) -> str:
    """Return the outcome in a few sentences; empty if nothing was evaluated."""
    weights = chosen_weights(run, comparison)
    if comparison is not None:
        text = _compared(run, comparison)
    else:
        evaluations = [e for e in run.evaluations if e.weights == weights]
        accuracies = fmt.listed(
            [f"{fmt.percent(e.accuracy)}{_interval(e, ' ({})')} {_against(run, e.attack)}" for e in evaluations]
        )
        text = f"{accuracies}, after {fmt.duration(run.seconds)} of training." if accuracies else ""
    if (strong := strongest(run, weights)) is None:
        return text
    entry, result = strong
    left = f"{fmt.percent(result.accuracy)} of {fmt.number(result.examples, 0)} test images"
    return f"{text} {run.attack_name(result.name)} leaves {left} ({entry.weights} weights{_interval(result, '; {}')})."


def _compared(run: Run, comparison: Comparison) -> str:
    mine, plain = comparison.mine, comparison.plain
    work, clock = comparison.speedup["work"], comparison.speedup["wall_clock"]
    text = ""
    if comparison.doubt and math.isfinite(work):
        passes = [fmt.number(row["work"], 1) for row in (mine, plain)]
        text = f"{passes[0]} passes an example with BulletTrain and {passes[1]} without: {fmt.times(work)} less work. "
    text += f"Trained in {fmt.duration(mine['seconds'])} with BulletTrain"
    text += f" and in {fmt.duration(plain['seconds'])} without"
    if math.isfinite(clock):
        text += f": {fmt.times(clock)} by the clock" + (f" ({comparison.doubt})" if comparison.doubt else "")
    parts = []
    for attack in comparison.attacks:
        gap, error = comparison.gap(attack), comparison.errors[attack]
        if math.isfinite(gap):
            parts.append(f"{fmt.points(gap, error=error)} {_against(run, attack)}{fmt.too_close(gap, error)}")
    return f"{text}." + (f" Accuracy changed by {fmt.listed(parts)}." if parts else "")


def _against(run: Run, attack: str) -> str:
    return {"clean": "on clean images", "views": "on AugMix views"}.get(attack, f"against {run.attack_name(attack)}")


def headline(run: Run, comparison: Comparison | None) -> list[Card]:
    """Return cards for accuracy (AutoAttack first), time and throughput, with the baseline's if there is one."""
    weights = chosen_weights(run, comparison)
    robust = "views" if run.makes_views else "pgd20"
    attacks = dict.fromkeys(["clean", robust, *(e.attack for e in run.evaluations if e.weights == weights)])
    plain = comparison.plain if comparison else Numbers()
    cards = []
    if strong := strongest(run, weights):
        entry, result = strong
        other = strongest(comparison.baseline, weights) if comparison else None
        same = other is not None and (other[1].name, other[1].examples) == (result.name, result.examples)
        where = f"{fmt.number(result.examples, 0)} test images, {entry.weights} weights{_interval(result, '; {}')}"
        base = other[1].accuracy if other and same else NAN
        cards.append(_accuracy(run.attack_name(result.name), result.accuracy, where, base))
    for attack in attacks:
        tested = run.accuracy(weights, attack)
        latest = last(run.epochs["validation_clean" if attack == "clean" else "validation_robust"])
        if math.isfinite(tested):
            (found, *_) = [e for e in run.evaluations if (e.weights, e.attack) == (weights, attack)]
            where = f"test set, {weights} weights{_interval(found, '; {}')}"
            cards.append(_accuracy(run.attack_name(attack), tested, where, plain[attack]))
        elif attack in ("clean", robust) and math.isfinite(latest):  # not tested yet
            name = run.attack_name("pgd10" if attack == "pgd20" else attack)
            cards.append(_accuracy(name, latest, "validation set, latest epoch"))
    epochs = len(run.epochs["epoch"])
    timed = math.isfinite(plain["seconds"])
    note = f"baseline {fmt.duration(plain['seconds'])}" if timed else f"{epochs} {fmt.plural('epoch', epochs)}"
    note += fmt.captures(run.capture_seconds, "; compiling and capturing: {} more")
    cards.append(Card(fmt.duration(run.seconds), "Training time" if run.ended else "Training time so far", note))
    rates = run.epochs["examples_per_second"]
    if np.isfinite(rates).any():
        cards.append(Card(fmt.number(float(np.nanmedian(rates)), 0), "Examples a second", "median over epochs"))
    return cards


def small_print(run: Run) -> str:
    """Explain the attack and threat of the figures in a line; empty without a threat."""
    if not run.threat:
        return ""
    norm, eps = run.threat.split()
    what = "every value of every pixel" if norm == "L∞" else "an image, in Euclidean length,"
    return f"{run.attack_name('pgd20')}: 20 gradient steps that change {what} by at most ε = {eps}, pixels in [0, 1]."


def _interval(result: Evaluation | Result, form: str) -> str:
    """Format the 95 % interval of an accuracy on few images; empty for many, or if their number is unknown."""
    if not 0 < result.examples < FEW_IMAGES:
        return ""
    low, high = wilson(result.accuracy * result.examples, round(result.examples))
    return form.format(f"95{fmt.THIN}% interval {100 * low:.0f} to {100 * high:.0f}".replace(" ", "\N{NO-BREAK SPACE}"))


def _accuracy(name: str, accuracy: float, where: str, baseline: float = NAN) -> Card:
    if math.isfinite(baseline):
        where += f"; baseline {fmt.percent(baseline)}, {fmt.points(accuracy - baseline)}"
    return Card(fmt.percent(accuracy), f"{name} accuracy", where)


# ----------------------------------------------------------------------------------------- speed-ups, steps


def speedups(run: Run, comparison: Comparison | None) -> dict[str, Any]:
    """Return the three speed-ups and the figures they are computed from."""
    measured, work = comparison.speedup if comparison else Numbers(), run.average("work")
    theoretical = measured.get("theoretical", run.totals["theoretical_speedup"])
    clock = measured["wall_clock"]
    counted = f"{fmt.number(work, 1)} passes an example" if math.isfinite(work) else ""
    if counted and math.isfinite(run.totals["plain_work"]):
        counted += f", {fmt.number(run.totals['plain_work'], 1)} without mining"
    return {
        "theoretical": fmt.times(theoretical),
        "formula": _formula(run) if math.isfinite(theoretical) else "",
        "work": fmt.times(measured.get("work", run.totals["work_speedup"])),
        "counted": counted,
        "clock": fmt.times(clock) if math.isfinite(clock) else "",
        "slower": clock < 1,
        "doubt": comparison.doubt.capitalize() if comparison else "",
        "in_all": fmt.in_all(comparison.mine, comparison.plain) if comparison else "",
    }


def _formula(run: Run) -> str:
    """Return the paper's formula with the numbers of this run."""
    share = {name: run.average(name) for name in SHARES}
    if len(run.budget) != len(SHARES) or not all(math.isfinite(value) for value in share.values()):
        return ""
    if run.makes_views:
        return f"3 / (1 + 2·{share['boundary']:.3f})"
    terms = [f"{share[name]:.3f}·{run.budget[name]}" for name in ("boundary", "robust", "outlier") if run.budget[name]]
    return f"({max(run.budget.values())} + 1) / ({' + '.join([*terms, '1'])})"


def average_batch(run: Run) -> list[dict[str, str]]:
    """Return the average shares of the three categories; empty if there are none."""
    shares = {name: run.average(name) for name in SHARES}
    if run.plain or not all(math.isfinite(value) and value >= 0 for value in shares.values()):
        return []
    notes = {name: f"{count} {fmt.plural('step', count)} each" for name, count in run.budget.items()}
    if run.makes_views:
        more = "more " if run.seen_as == "as views" else ""
        notes = {name: f"two {more}views each" if count else f"no {more}views" for name, count in run.budget.items()}
    paper = paper_boundary(str(run.config.get("recipe")))
    if paper is not None:
        notes["boundary"] = f"{notes.get('boundary', '')}; {fmt.percent(paper, 0)} in the paper"
    return [
        {"name": name, "percent": fmt.percent(value, 0), "width": f"{100 * value:.2f}", "note": notes.get(name, "")}
        for name, value in shares.items()
    ]


def mean_steps(run: Run) -> str:
    """Return the mean steps of an allocation that is not by category, in a sentence; empty if unknown."""
    if not math.isfinite(run.mean_steps):
        return ""
    where = "in the last logged batch" if run.batch else "on average"
    most = run.section("method").get("boundary")
    return f"An example got {fmt.number(run.mean_steps, 1)} attack steps {where}, at most {most}."
