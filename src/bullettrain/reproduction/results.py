"""What has been measured of a study: every row's figures over its seeds, and whether the paper's claims hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bullettrain.config.sections import SPEED
from bullettrain.config.settings import ConfigError
from bullettrain.evaluation.comparison import Measured
from bullettrain.formatting import CHANCE
from bullettrain.formatting import attack_name as attack_title
from bullettrain.reproduction.records import Record, run_name
from bullettrain.reproduction.rows import Row
from bullettrain.reproduction.scales import Scale
from bullettrain.reproduction.studies import LARGE, RATIOS, SHARES, Check, Study
from bullettrain.reproduction.tasks import attack_name

CORRELATIONS = ("rank", "rank_correct")
ALLOWED = {**dict.fromkeys(SHARES, 1.0), **dict.fromkeys(CORRELATIONS, 0.02)}
"""By how much a figure may fall short of the paper's claim and still meet it, in its own unit; accuracies: half a
point, speed-ups: a twentieth. Captured steps round sizes up."""
NOT_RUN = "not run yet"
BLIND = 1.0
"""Standard error, in points, from which on a figure says little of claims about a point or two."""


class Verdict(Enum):
    """Whether a claim holds; the value is how it is said."""

    HOLDS = "holds"
    PART = "holds in part"
    CHANCE = "too close to tell"
    FAILS = "does not hold here"
    OPEN = "not measured yet"


@dataclass(frozen=True)
class CheckResult:
    """A check, and what came out.

    Args:
        error: standard error of an accuracy that was found: of the seeds, and of the images.
        paired: whether that of the images is of the same ones, image by image.
    """

    check: Check
    found: float | None
    verdict: Verdict
    error: float | None = None
    paired: bool = False

    @property
    def near(self) -> bool:
        """Whether it holds by the allowance alone."""
        return self.verdict is Verdict.HOLDS and self.found is not None and _shortfall(self.check, self.found) > 0


def _shortfall(check: Check, found: float) -> float:
    """By how much ``found`` misses what is claimed."""
    return {"≥": check.offset - found, "≤": found - check.offset, "≈": abs(found) - check.offset}[check.relation]


class Results:
    """A study's rows among records, with all their seeds; ``settings`` are the user's, on top of every row's."""

    def __init__(self, study: Study, scale: Scale, records: Mapping[str, Record], settings: Sequence[str] = ()) -> None:
        self.study, self.scale, self.settings = study, scale, tuple(settings)
        self.rows: dict[str, Row] = {}
        self.runs: dict[str, list[Record]] = {}
        for row in study.rows(scale):
            with contextlib.suppress(ConfigError):  # a row that does not take the user's settings is left out
                stem = run_name(row.config(scale, settings)).rpartition("-s")[0]
                runs = [record for record in records.values() if record.stem == stem and record.finished]
                self.rows[row.name], self.runs[row.name] = row, sorted(runs, key=lambda run: run.seed)
        self.columns = study.columns or (*study.attacks, *RATIOS)
        self.claims = study.claims(scale) if scale.like_paper else {}
        """The paper's, of this study; none at scale smoke, whose figures mean nothing."""

    def metric(self, name: str) -> str:
        """What the paper's attack is called at this scale; other metrics keep their name."""
        return attack_name(self.scale.attacks.get(name, name)) if name.startswith(("pgd", "autoattack")) else name

    def title(self, metric: str) -> str:
        """That attack's name, for a person."""
        return attack_title(self.metric(metric))

    def value(self, row: str, metric: str) -> Measured | None:
        """A row's figure over its seeds; None where it is not known."""
        if metric in RATIOS:
            ratios = tuple(self._ratios(row, metric))
            return Measured(ratios) if ratios else None
        name = self.metric(metric)
        values = tuple(value for run in self.runs.get(row, []) if (value := run.value(name)) is not None)
        figures = tuple(run.figures[name] for run in self.runs.get(row, []) if name in run.figures)
        return Measured(values, figures) if values else None

    def values(self, row: str, metrics: Sequence[str]) -> list[Measured] | None:
        """Several figures of a row; None where one of them is not known."""
        found = [value for metric in metrics if (value := self.value(row, metric)) is not None]
        return found if len(found) == len(metrics) else None

    def _ratios(self, row: str, metric: str) -> Iterator[float]:
        """How much less than its baseline a row takes, seed by seed; 1 for a baseline itself."""
        bases = {run.seed: run for run in self.runs.get(self.rows[row].baseline or row, [])} if row in self.rows else {}
        for run in self.runs.get(row, []):
            base = bases.get(run.seed)
            if base is None or (metric == "wall" and _circumstances(run) != _circumstances(base)):
                continue
            theirs, mine = _cost(base, metric), _cost(run, metric)
            if theirs and mine:
                yield theirs / mine

    # -------------------------------------------------------------------------------------------- claims

    def check(self, check: Check) -> CheckResult:
        """Whether a check comes out as the paper has it."""
        known = [value for row in check.rows if (value := self.value(row, check.metric)) is not None]
        other = self.value(check.against, check.metric) if check.against else Measured((0.0,))
        if other is None or len(known) < len(check.rows):
            return CheckResult(check, None, Verdict.OPEN)
        best = max(known, key=lambda value: value.mean)
        apart = best.above(other)
        short, noise = _shortfall(check, apart.value), CHANCE * apart.error
        verdict = Verdict.HOLDS if short <= _slack(check) else Verdict.CHANCE if short <= noise else Verdict.FAILS
        if verdict is Verdict.HOLDS and apart.error > BLIND and short > -noise:
            verdict = Verdict.CHANCE  # too few images to see what is claimed
        return CheckResult(check, apart.value, verdict, apart.error if best.figures else None, apart.paired)

    def verdict(self, checks: Iterable[Check]) -> tuple[Verdict, list[CheckResult]]:
        """Of a claim: it holds where all its ``checks`` do, and in part where only some do."""
        results = [self.check(check) for check in checks]
        found = {result.verdict for result in results}
        if len(found) > 1 and Verdict.HOLDS in found:
            return Verdict.PART, results
        order = (Verdict.FAILS, Verdict.OPEN, Verdict.CHANCE, Verdict.HOLDS)
        return min(found, key=order.index), results

    def cell(self, row: str, metric: str, *, gained: bool | None = None) -> Verdict | None:
        """How a cell of the table is coloured: the worst of the claims about it; None where there are none.

        ``gained``: of what it gains on its own baseline alone, or of everything else alone.
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
        """What is to be said of a row beside its figures: that there are none, or that it collapsed."""
        runs = self.runs[row.name]
        said = [warning.partition(":")[0].partition(";")[0] for run in runs for warning in run.warnings]
        for run in runs if self.study.name == LARGE else ():
            shown = [f"{attack_title(name)} {100 * figure['accuracy']:.2f}" for name, figure in run.averaged.items()]
            said += [f"averaged weights: {', '.join(shown)}"] if shown else []
        return "; ".join(dict.fromkeys(said)) if runs else NOT_RUN

    def notes(self) -> list[str]:
        """What a reader has to know of figures, each once; in brackets the rows that it is about, unless it is all."""
        about: dict[str, list[str]] = {}
        for name, runs in self.runs.items():
            for note in dict.fromkeys(note for run in runs for note in self._small_print(run)):
                about.setdefault(note, []).append(self.rows[name].title)
        run = sum(bool(runs) for runs in self.runs.values())
        said = {note: "" if len(rows) == run > 1 else f" ({'; '.join(rows)})" for note, rows in about.items()}
        return [f"{note}{rows}." for note, rows in said.items()]

    def _small_print(self, run: Record) -> Iterator[str]:
        """Figures that are of fewer images, of other corruptions or less exact than one would think."""
        whole = run.figures.get("clean", {}).get("examples", 0)
        if run.note:
            yield run.note
        for name in dict.fromkeys(self.metric(attack) for attack in self.study.attacks):
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
    """Of several; what is not measured does not hide what is."""
    order = (Verdict.FAILS, Verdict.CHANCE, Verdict.PART, Verdict.HOLDS, Verdict.OPEN)
    return min((verdict for verdict in verdicts if verdict is not None), key=order.index, default=None)


def _slack(check: Check) -> float:
    """What does not count; no more than what is claimed, so that less is never called more."""
    allowed = 0.05 * abs(check.offset) if check.metric in RATIOS else ALLOWED.get(check.metric, 0.5)
    return 0.0 if check.relation == "≈" else min(allowed, abs(check.offset))


def _cost(run: Record, metric: str) -> float | None:
    # All passes of the run, not those of an example: methods may see examples more often, or for fewer epochs.
    return {"wall": run.alone, "work": run.work * run.examples, "theoretical": run.sequential}[metric]


def _circumstances(run: Record) -> list[Any]:
    """What has to be the same for seconds to be compared."""
    where = ("device", "torch", "commit") if run.timing else ("device", "torch")
    training = run.config["training"]
    return [bool(run.timing), *map(run.timed_in.get, where), *map(training.get, (*SPEED, "precision"))]
