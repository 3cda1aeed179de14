"""The results of a study: the figures of every row over its seeds, and whether the paper's claims hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist
from typing import Any

from bullettrain.config.sections import SPEED
from bullettrain.config.settings import ConfigError
from bullettrain.evaluation.comparison import Measured
from bullettrain.formatting import CHANCE_ERRORS
from bullettrain.formatting import attack_name as attack_title
from bullettrain.reproduction.records import Record, run_name
from bullettrain.reproduction.rows import Row
from bullettrain.reproduction.scales import Scale
from bullettrain.reproduction.studies import LARGE, RATIOS, SHARES, Check, Study
from bullettrain.reproduction.tasks import attack_name

CORRELATIONS = ("rank", "rank_correct")
TOLERANCES = {**dict.fromkeys(SHARES, 1.0), **dict.fromkeys(CORRELATIONS, 0.02)}
"""By how much a figure may miss a claim and be too close to tell, by metric; 5 % for speed-ups, nothing for accuracies,
which have a standard error instead."""
NOT_RUN = "not run yet"


class Verdict(Enum):
    """Whether a claim holds. The values are shown to users."""

    HOLDS = "holds"
    PART = "holds in part"
    CHANCE = "too close to tell"
    FAILS = "does not hold here"
    OPEN = "not measured yet"


FINAL_VERDICTS = {"≥": Verdict.HOLDS, "≤": Verdict.FAILS}
"""The clear verdicts on the best of several rows that further rows cannot change."""


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Args:
        error: standard error of an accuracy, over seeds and images.
        paired: whether ``error`` compares the same images, image by image.
    """

    check: Check
    found: float | None
    verdict: Verdict
    error: float | None = None
    paired: bool = False


class Results:
    """The records of a study's rows, with all seeds; ``settings`` are the user's, for every row."""

    def __init__(self, study: Study, scale: Scale, records: Mapping[str, Record], settings: Sequence[str] = ()) -> None:
        self.study, self.scale, self.settings = study, scale, tuple(settings)
        self.rows: dict[str, Row] = {}
        self.runs: dict[str, list[Record]] = {}
        for row in study.rows(scale):
            with contextlib.suppress(ConfigError):  # leave out rows that the user's settings do not fit
                stem = run_name(row.config(scale, settings)).rpartition("-s")[0]
                runs = [record for record in records.values() if record.stem == stem and record.finished]
                self.rows[row.name], self.runs[row.name] = row, sorted(runs, key=lambda run: run.seed)
        self.columns = study.columns or (*study.attacks, *RATIOS)
        self.claims = study.claims(scale) if scale.like_paper else {}
        """The paper's claims; none at scale smoke, whose figures mean nothing."""

    def metric(self, name: str) -> str:
        """Return the name of a metric at this scale, which may replace the paper's attacks."""
        return (
            attack_name(self.scale.attacks.get(name, name)) if name.startswith(("pgd", "apgd", "autoattack")) else name
        )

    def title(self, metric: str) -> str:
        """Return the title of an attack at this scale."""
        return attack_title(self.metric(metric))

    def value(self, row: str, metric: str) -> Measured | None:
        """Return a row's figure over its seeds, or None if unknown."""
        if metric in RATIOS:
            ratios = tuple(self._ratios(row, metric))
            return Measured(ratios) if ratios else None
        name = self.metric(metric)
        values = tuple(value for run in self.runs.get(row, []) if (value := run.value(name)) is not None)
        figures = tuple(run.figures[name] for run in self.runs.get(row, []) if name in run.figures)
        return Measured(values, figures) if values else None

    def values(self, row: str, metrics: Sequence[str]) -> list[Measured] | None:
        """Return several figures of a row, or None if one is unknown."""
        values = [value for metric in metrics if (value := self.value(row, metric)) is not None]
        return values if len(values) == len(metrics) else None

    def _ratios(self, row: str, metric: str) -> Iterator[float]:
        """Yield the speed-up of a row over its baseline for each seed; 1 for a baseline itself."""
        bases = {run.seed: run for run in self.runs.get(self.rows[row].baseline or row, [])} if row in self.rows else {}
        for run in self.runs.get(row, []):
            base = bases.get(run.seed)
            if base is not None and (metric != "wall" or _circumstances(run) == _circumstances(base)):
                base_cost, cost = _cost(base, metric), _cost(run, metric)
                if base_cost and cost:
                    yield base_cost / cost

    # -------------------------------------------------------------------------------------------- claims

    def check(self, check: Check) -> CheckResult:
        """Return whether a check holds. Rows that are missing may be better than the best that is there."""
        values = [value for row in check.rows if (value := self.value(row, check.metric)) is not None]
        other = self.value(check.against, check.metric) if check.against else Measured((0.0,))
        if other is None or not values:
            return CheckResult(check, None, Verdict.OPEN)
        best = max(values, key=lambda value: value.mean)
        gap = best.above(other)
        relations = {"≥": check.offset - gap.value, "≤": gap.value - check.offset, "≈": abs(gap.value) - check.offset}
        missing, noise = relations[check.relation], chance_errors(len(values)) * gap.error
        allowed = max(noise, _tolerance(check))
        verdict = Verdict.HOLDS if missing <= -noise else Verdict.CHANCE if missing <= allowed else Verdict.FAILS
        if len(values) < len(check.rows) and verdict not in (Verdict.CHANCE, FINAL_VERDICTS.get(check.relation)):
            return CheckResult(check, None, Verdict.OPEN)
        return CheckResult(check, gap.value, verdict, gap.error if best.figures else None, gap.paired)

    def verdict(self, checks: Iterable[Check]) -> tuple[Verdict, list[CheckResult]]:
        """Return the verdict of a claim: it holds if all its ``checks`` do, and in part if some do."""
        results = [self.check(check) for check in checks]
        verdicts = {result.verdict for result in results}
        if len(verdicts) > 1 and Verdict.HOLDS in verdicts:
            return Verdict.PART, results
        order = (Verdict.FAILS, Verdict.OPEN, Verdict.CHANCE, Verdict.HOLDS)
        return min(verdicts, key=order.index), results

    def cell(self, row: str, metric: str, *, gained: bool | None = None) -> Verdict | None:
        """Return the worst verdict of the claims about a cell of the table, or None if there are none.

        Args:
            row, metric: the cell.
            gained: True for claims about the gain on the row's baseline only, False for all others; None for all.
        """
        base = self.rows[row].baseline
        return worst(
            self.check(check).verdict
            for checks in self.claims.values()
            for check in checks
            if check.rows == (row,) and check.metric == metric
            if gained is None or gained == (check.against is not None and check.against == base)
        )

    # ---------------------------------------------------------------------------------------------- notes

    def status(self, row: Row) -> str:
        """Return a remark on a row: not run yet, its warnings, its averaged weights."""
        runs = self.runs[row.name]
        remarks = [warning.partition(":")[0].partition(";")[0] for run in runs for warning in run.warnings]
        for run in runs if self.study.name == LARGE else ():
            shown = [f"{attack_title(name)} {100 * figure['accuracy']:.2f}" for name, figure in run.averaged.items()]
            remarks += [f"averaged weights: {', '.join(shown)}"] if shown else []
        return "; ".join(dict.fromkeys(remarks)) if runs else NOT_RUN

    def notes(self) -> list[str]:
        """Return notes on the figures, with the rows that each is about unless these are all."""
        notes: dict[str, list[str]] = {}
        for name, runs in self.runs.items():
            for note in dict.fromkeys(note for run in runs for note in self._notes_on(run)):
                notes.setdefault(note, []).append(self.rows[name].title)
        run = [self.rows[name].title for name, runs in self.runs.items() if runs]
        said = []
        for note, titles in notes.items():
            others = [title for title in run if title not in titles]
            if others and 3 * len(others) <= len(run):
                about = f" (all rows but {'; '.join(others)})"
            else:
                about = f" ({'; '.join(titles)})" if others or len(run) == 1 else ""
            said.append(f"{note}{about}.")
        return said

    def _notes_on(self, run: Record) -> Iterator[str]:
        """Yield notes on figures of fewer images, fewer corruptions, lower precision or unusual timing."""
        whole = run.figures.get("clean", {}).get("examples", 0)
        if run.note:
            yield run.note
        for name in dict.fromkeys(map(self.metric, (*self.study.attacks, *self.columns))):
            figure, title = run.figures.get(name, {}), attack_title(name)
            if figure.get("over", 15) != 15:
                yield f"{title}: the mean of {figure['over']:.0f}, not of 15"
            elif figure.get("examples", whole) < whole:
                part = f"{title} on {figure['examples']:.0f} of {whole:.0f} test images"
                yield part + (", and compared on these" if figure.get("among") else "")
            if "precision" in figure:
                yield f"{title} searched in {figure['precision']}"
        if {"minutes", "wall"} & set(self.columns):
            if run.timing:
                yield "Seconds are of steps that were timed afterwards, the device to themselves"
            elif run.jobs > 1:
                yield "No seconds: the device was shared (`--timing` times such runs)"


def worst(verdicts: Iterable[Verdict | None]) -> Verdict | None:
    """Return the worst verdict; one that is not measured yet comes last."""
    order = (Verdict.FAILS, Verdict.CHANCE, Verdict.PART, Verdict.HOLDS, Verdict.OPEN)
    return min((verdict for verdict in verdicts if verdict is not None), key=order.index, default=None)


def chance_errors(rows: int) -> float:
    """Return within how many standard errors the best of ``rows`` is too close to tell: two for one row, 3.0 for 16.

    The best of several rows is the luckiest of them, too. It is off by more than the returned value with the
    probability with which one row is off by more than two standard errors.
    """
    normal = NormalDist()
    return CHANCE_ERRORS if rows == 1 else normal.inv_cdf(normal.cdf(CHANCE_ERRORS) ** (1 / rows))


def _tolerance(check: Check) -> float:
    """Return by how much a figure may miss a claim; at most what is claimed, so that a loss is never called a gain."""
    allowed = 0.05 * abs(check.offset) if check.metric in RATIOS else TOLERANCES.get(check.metric, 0.0)
    return 0.0 if check.relation == "≈" else min(allowed, abs(check.offset))


def _cost(run: Record, metric: str) -> float | None:
    # Passes of the whole run, since methods may train for fewer epochs or see examples more often.
    return {"wall": run.timed_seconds, "work": run.work * run.examples, "theoretical": run.sequential}[metric]


def _circumstances(run: Record) -> list[Any]:
    """Return what has to be equal for wall-clock times to be compared."""
    where = ("device", "torch", "commit") if run.timing else ("device", "torch")
    training = run.config["training"]
    return [bool(run.timing), *map(run.timed_in.get, where), *map(training.get, (*SPEED, "precision"))]
