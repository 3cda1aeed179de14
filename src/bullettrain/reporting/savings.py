"""What mining saved: the three speed-ups, and what the average batch was made of."""

from __future__ import annotations

import math

from bullettrain.formatting import in_all, number, percent, plural, times
from bullettrain.reporting.headline import Card
from bullettrain.reporting.paper import paper_boundary
from bullettrain.reporting.run import Comparison, Run
from bullettrain.run_folder import SHARES


def speedups(run: Run, comparison: Comparison | None) -> list[Card]:
    """The three speed-ups, each with what it means; never one for another."""
    measured = comparison.speedup if comparison else {}
    theoretical = measured.get("theoretical", run.totals["theoretical_speedup"])
    work, clock = measured.get("work", run.totals["work_speedup"]), measured.get("wall_clock", math.nan)
    later = " Known when the run ends." if run.ended is None else ""
    formula = "steps of the plain algorithm against those taken, plus one on either side for the update."
    if run.makes_views:
        formula = "an image and two views of it, against two views of boundary examples alone."
    passes = "Every pass counted: forward, backward to the input and backward to the weights are one each."
    taken = run.average("work")
    counted = f"{number(taken, 1)} passes an example" if math.isfinite(taken) else ""
    if counted and math.isfinite(run.totals["plain_work"]):
        counted += f", {number(run.totals['plain_work'], 1)} without mining"
    explained = f"The paper’s formula, from the measured shares: {formula}{later}"
    cards = [
        Card(times(theoretical), "Theoretical", explained, _formula(run) if math.isfinite(theoretical) else ""),
        Card(times(work), "Work", passes + later, counted),
    ]
    if comparison is not None and math.isfinite(clock):
        wall = "Seconds of this training against seconds of the same recipe without mining, on the same device."
        wall += " Below 1×, mining cost more time than it saved." if clock < 1 else ""
        wall += f" {comparison.doubt.capitalize()}." if comparison.doubt else ""
        cards.append(Card(times(clock), "Wall-clock", f"{wall} {in_all(comparison.mine, comparison.plain)}".strip()))
    return cards


def _formula(run: Run) -> str:
    """The paper's formula with this run's own numbers."""
    share = {name: run.average(name) for name in SHARES}
    if len(run.budget) != len(SHARES) or not all(math.isfinite(value) for value in share.values()):
        return ""
    if run.makes_views:
        return f"3 / (1 + 2·{share['boundary']:.3f})"
    terms = [f"{share[name]:.3f}·{run.budget[name]}" for name in ("boundary", "robust", "outlier") if run.budget[name]]
    return f"({max(run.budget.values())} + 1) / ({' + '.join([*terms, '1'])})"


def average_batch(run: Run) -> list[dict[str, str]]:
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
    return [
        {"name": name, "percent": percent(value, 0), "width": f"{100 * value:.2f}", "note": notes.get(name, "")}
        for name, value in found.items()
    ]
