"""What has been measured of a study: every row's figures over its seeds, and whether the paper's claims hold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bullettrain.evaluation.compared import Difference, difference
from bullettrain.evaluation.statistics import CHANCE
from bullettrain.reporting.words import attack_name as attack_title
from bullettrain.reporting.words import listed
from bullettrain.reproduction.records import WHERE, Record, run_name
from bullettrain.reproduction.rows import attack_name
from bullettrain.reproduction.scales import Scale
from bullettrain.reproduction.study import RATIOS, SHARES, Check, Claim, Row, Study
from bullettrain.training.settings import ConfigError

RANKS = ("rank", "rank_correct")
SLACK = {"points": 0.5, "shares": 1.0, "ratio": 0.05, "rank": 0.02}
"""By how much a figure may fall short of the paper's claim and still meet it: points, those of a class's share of the
examples (captured steps round sizes up), a part of a ratio, a ρ."""
NOT_RUN = "not run yet"
"""Of a row."""
BLIND = 1.0
"""Standard error, in points, from which on a figure says little of claims about a point or two."""
HOW_FAST = ("engine", "compile", "joint", "bucket", "channels_last", "precision", "threads")
"""Settings of training that change how long it takes, and nothing else."""


class Verdict(Enum):
    """Whether a claim holds; the value is how it is said."""

    HOLDS = "holds"
    PART = "holds in part"
    CHANCE = "too close to tell"
    FAILS = "does not hold here"
    OPEN = "not measured yet"


@dataclass(frozen=True)
class Measured:
    """A figure over seeds."""

    values: tuple[float, ...]
    figures: tuple[Mapping[str, Any], ...] = ()
    """What records keep of an accuracy, seed by seed."""

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def error(self) -> float:
        """Standard error of the mean over the seeds, where there are some."""
        return 0.0 if self.std is None else self.std / math.sqrt(len(self.values))

    @property
    def std(self) -> float | None:
        """Of the seeds, where there are several."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def above(self, other: Measured) -> Difference:
        """How far it is above ``other``, in its own unit; of the same images where that is known."""
        images = difference(self.figures, other.figures)
        value = 100 * images.value if images.paired else self.mean - other.mean
        return Difference(value, math.hypot(self.error, other.error, 100 * images.error), images.paired)


@dataclass(frozen=True)
class Judged:
    """A check, what came out, and by how much it misses."""

    check: Check
    found: float | None
    verdict: Verdict
    error: float | None = None
    """Standard error of an accuracy that was found: of the seeds, and of the images that were judged."""
    paired: bool = False
    """Whether that of the images is of the same ones, image by image."""


class Results:
    """A study's rows among records, with all their seeds; ``settings`` are the user's, on top of every row's."""

    def __init__(
        self, study: Study, scale: Scale, records: Mapping[str, Record], *, settings: Sequence[str] = ()
    ) -> None:
        self.study, self.scale, self.settings = study, scale, tuple(settings)
        self.rows = {row.name: row for row in study.rows(scale)}
        self.runs: dict[str, list[Record]] = {}
        self.refusing: set[str] = set()
        """Rows that do not take the user's settings: there are no such runs."""
        for row in self.rows.values():
            try:
                stem = _stem(run_name(row.config(scale, settings)))
            except ConfigError:
                if not settings:
                    raise
                self.refusing.add(row.name)
                self.runs[row.name] = []
                continue
            runs = [record for name, record in records.items() if _stem(name) == stem and record.finished]
            self.runs[row.name] = sorted(runs, key=lambda run: run.seed)
        if len(self.refusing) == len(self.rows):
            next(iter(self.rows.values())).config(scale, settings)  # says why

    def columns(self) -> tuple[str, ...]:
        """Of the table."""
        return self.study.columns or (*self.study.attacks, *RATIOS)

    def metric(self, name: str) -> str:
        """What the paper's attack is called at this scale; other metrics keep their name."""
        return attack_name(self.scale.attack(name)) if name.startswith(("pgd", "autoattack")) else name

    def value(self, row: str, metric: str) -> Measured | None:
        """A row's figure over its seeds; None where it is not known."""
        runs = self.runs.get(row, [])
        if metric in RATIOS:
            values = self._ratios(row, metric)
            return Measured(tuple(values)) if values else None
        name = self.metric(metric)
        found = [(value, run) for run in runs if (value := run.value(name)) is not None]
        if not found:
            return None
        figures = tuple(run.figures[name] for _, run in found if name in run.figures)
        return Measured(tuple(value for value, _ in found), figures)

    def values(self, row: str, metrics: Sequence[str]) -> list[Measured] | None:
        """Several figures of a row; None where one of them is not known."""
        found = [value for metric in metrics if (value := self.value(row, metric)) is not None]
        return found if len(found) == len(metrics) else None

    def _ratios(self, row: str, metric: str) -> list[float]:
        """How much less than its baseline a row takes, seed by seed; 1 for a baseline itself."""
        base = self.rows[row].baseline
        runs = {run.seed: run for run in self.runs[row]}
        bases = {run.seed: run for run in self.runs.get(base, [])} if base else runs
        found = []
        for seed in runs.keys() & bases.keys():
            costs = [_cost(run, metric) for run in (bases[seed], runs[seed])]
            if (
                costs[0]
                and costs[1]
                and (metric != "wall" or _circumstances(runs[seed]) == _circumstances(bases[seed]))
            ):
                found.append(costs[0] / costs[1])
        return found

    # -------------------------------------------------------------------------------------------- claims

    def claims(self) -> tuple[Claim, ...]:
        """The paper's, of this study; none at scale smoke, whose figures mean nothing."""
        return self.study.claims(self.scale) if self.scale.like_paper else ()

    def judge(self, check: Check) -> Judged:
        """Whether a check comes out as the paper has it."""
        known = [value for row in check.rows if (value := self.value(row, check.metric)) is not None]
        other = self.value(check.against, check.metric) if check.against else Measured((0.0,))
        if other is None or len(known) < len(check.rows):
            return Judged(check, None, Verdict.OPEN)
        best = max(known, key=lambda value: value.mean)
        apart = best.above(other)
        found = apart.value
        short = {"≥": check.offset - found, "≤": found - check.offset, "≈": abs(found) - check.offset}[check.relation]
        slack, noise = self._slack(check), CHANCE * apart.error
        verdict = Verdict.HOLDS if short <= slack else Verdict.CHANCE if short <= noise else Verdict.FAILS
        if verdict is Verdict.HOLDS and apart.error > BLIND and short > -noise:
            verdict = Verdict.CHANCE  # too few images to see what is claimed
        return Judged(check, found, verdict, apart.error if best.figures else None, apart.paired)

    @staticmethod
    def _slack(check: Check) -> float:
        """What does not count; no more than what is claimed, so that less is never called more."""
        if check.relation == "≈":
            return 0.0
        if check.metric in RATIOS:
            return SLACK["ratio"] * abs(check.offset)
        slack = SLACK["rank" if check.metric in RANKS else "shares" if check.metric in SHARES else "points"]
        return min(slack, abs(check.offset))

    def verdict(self, claim: Claim) -> tuple[Verdict, list[Judged]]:
        """Of a claim: it holds where all its checks do, and in part where only some do."""
        judged = [self.judge(check) for check in claim.checks]
        found = {part.verdict for part in judged}
        if len(found) == 1:
            return found.pop(), judged
        if Verdict.HOLDS in found:
            return Verdict.PART, judged
        return next(verdict for verdict in (Verdict.FAILS, Verdict.OPEN, Verdict.CHANCE) if verdict in found), judged

    def cell(self, row: str, metric: str, *, gained: bool | None = None) -> Verdict | None:
        """How a cell of the table is coloured: the worst of the claims about it; None where there are none.

        ``gained``: of what it gains on its own baseline alone, or of everything else alone.
        """
        checks = [check for claim in self.claims() for check in claim.checks]
        about = [check for check in checks if check.rows == (row,) and check.metric == metric]
        base = self.rows[row].baseline
        found = [
            self.judge(check).verdict
            for check in about
            if gained is None or gained == (check.against is not None and check.against == base)
        ]
        return worst(found)

    def status(self, row: Row) -> str:
        """What is to be said of a row beside its figures: that there are none, or that it collapsed."""
        runs = self.runs[row.name]
        if not runs:
            return "does not take these settings" if row.name in self.refusing else NOT_RUN
        said = (warning.partition(":")[0].partition(";")[0] for run in runs for warning in run.warnings)
        return "; ".join(dict.fromkeys(said))

    def notes(self) -> list[str]:
        """What a reader has to know of figures, each once, with the rows that it is about or the few that it is not."""
        about: dict[tuple[str, str], list[str]] = {}
        for name, runs in self.runs.items():
            for said in dict.fromkeys(said for run in runs for said in self._small_print(run)):
                about.setdefault(said, []).append(name)
        for row in self.rows.values():
            if self.runs[row.name] and row.baseline in self.rows and not self.runs[row.baseline]:
                lacks = f"no comparison, as long as {self.rows[row.baseline].title} has not been run"
                about.setdefault(("", lacks), []).append(row.name)
        others = {attack_title(self.metric(name)): attack_title(name) for name in self.study.attacks}
        weaker = [f"{ours} for {theirs}" for ours, theirs in others.items() if ours != theirs]
        standing_in = [f"At this scale {listed(weaker)}."] if weaker and any(self.runs.values()) else []
        return standing_in + [self._note(note, metric, rows) for (metric, note), rows in about.items()]

    def _note(self, note: str, metric: str, rows: list[str]) -> str:
        """``note`` as a sentence: of all rows that have the figure, of all but some, or of those ``rows`` alone."""
        have = [
            name for name, runs in self.runs.items() if any(not metric or run.value(metric) is not None for run in runs)
        ]
        others = [name for name in have if name not in rows]
        if not others and len(rows) > 1:
            return f"{note[0].upper()}{note[1:]}."
        exempt = 0 < len(others) < len(rows) / 2
        titles = [self.rows[name].title for name in (others if exempt else rows)]
        named = listed(titles) if len(titles) < 3 or not any("," in title for title in titles) else "; ".join(titles)
        return f"{'All but ' if exempt else ''}{named}: {note}."

    def _small_print(self, run: Record) -> list[tuple[str, str]]:
        """By metric: figures that are of fewer images, of other corruptions or less exact than one would think."""
        whole, said = run.figures.get("clean", {}).get("examples", 0), [("", run.note)] if run.note else []
        for name in dict.fromkeys(self.metric(attack) for attack in self.study.attacks):
            figure = run.figures.get(name, {})
            if figure.get("over", 15) != 15:
                said.append((name, f"corruptions: the mean of {figure['over']:.0f}, not of 15"))
            elif figure.get("examples", whole) < whole:
                part = f"{attack_title(name)} on {figure['examples']:.0f} of {whole:.0f} test images"
                said.append((name, part + (", and compared on these" if figure.get("among") else "")))
            if "precision" in figure:
                said.append((name, f"{attack_title(name)} searched in {figure['precision']}"))
        if {"minutes", "wall"} & set(self.columns()):
            if run.pace:
                said.append(("minutes", "seconds are of steps that were timed afterwards, the device to themselves"))
            elif run.jobs > 1:
                said.append(("", "no seconds: the device was shared (`--pace` times such runs)"))
        return said


def worst(verdicts: Iterable[Verdict | None]) -> Verdict | None:
    """Of several; what is not measured does not hide what is."""
    order = (Verdict.FAILS, Verdict.CHANCE, Verdict.PART, Verdict.HOLDS, Verdict.OPEN)
    return min((verdict for verdict in verdicts if verdict is not None), key=order.index, default=None)


def _stem(name: str) -> str:
    """A run's name but for its seed."""
    return name.rpartition("-s")[0]


def _cost(run: Record, metric: str) -> float | None:
    if metric == "wall":
        return run.alone
    # All passes of the run, not those of an example: methods may see examples more often, or for fewer epochs.
    return run.work * run.examples if metric == "work" else run.sequential


def _circumstances(run: Record) -> list[Any]:
    """What has to be the same for seconds to be compared."""
    training = run.config["training"]
    where = run.pace.get("environment", run.environment)
    same = WHERE if run.pace else ("device", "torch")
    return [bool(run.pace), *(where.get(key) for key in same), *(training.get(key) for key in HOW_FAST)]
