"""What can be reproduced: the paper's tables and figures, its claims about them, and the plane of all methods."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from bullettrain.config.settings import ConfigError
from bullettrain.reporting.paper import CLAIMS
from bullettrain.reproduction import rows
from bullettrain.reproduction.rows import Row
from bullettrain.reproduction.scales import Scale

SHARES = ("boundary", "robust", "outlier")
"""The classes of examples, in the order in which the paper has their shares."""
RATIOS = ("theoretical", "work", "wall")
"""Speed-ups, against a row's baseline."""
RANKS = "ranks"
"""In the place of an attack: how the row's score orders examples, beside the oracle's classes."""
LARGE = "large-network"
"""What `reproduce --scale medium` and `paper` run where no name is given."""
ROBUST = ("clean", "pgd20", "autoattack")
TABLE = (*ROBUST, "shares", *RATIOS)
ORACLE = ("clean", "pgd100x20")
STRONG = ("clean", "pgd20", "pgd100x10", "pgd1000x5", "autoattack")


@dataclass(frozen=True)
class Check:
    """The best of ``rows``, less the row ``against``, is ≥, ≤ or within (≈) ``offset``."""

    rows: tuple[str, ...]
    metric: str
    relation: str
    offset: float
    against: str | None = None


@dataclass(frozen=True)
class Study:
    """A table or a figure of the paper.

    Args:
        attacks: what every row is evaluated by, in the paper's names; RANKS means nothing of a baseline.
        columns: of its table; empty: the attacks and the speed-ups.
        about: what to know when reading it.
    """

    name: str
    title: str
    rows: Callable[[Scale], tuple[Row, ...]]
    attacks: tuple[str, ...] = ("clean", "pgd20")
    columns: tuple[str, ...] = ()
    about: str = ""

    def chosen(self, scale: Scale, patterns: Sequence[str]) -> list[Row]:
        """The rows that ``patterns`` name, with * for any; all where there are none."""
        rows = {row.name: row for row in self.rows(scale)}
        for pattern in patterns:
            if not fnmatch.filter(rows, pattern):
                there = ", ".join(rows)
                raise ConfigError(f"{self.name} has no row {pattern!r} at scale {scale.name}; there are {there}")
        found = {name for pattern in patterns or ["*"] for name in fnmatch.filter(rows, pattern)}
        return [row for name, row in rows.items() if name in found]

    def claims(self, scale: Scale) -> dict[str, list[Check]]:
        """What the paper says of its rows: sentences, and the checks that each stands on."""
        rows, claims = [row.name for row in self.rows(scale)], CLAIMS.get(self.name, {})
        found = {text: [_checks(check, rows) for check in checks.split("; ")] for text, checks in claims.items()}
        return {text: [check for group in groups for check in group] for text, groups in found.items()}


def _checks(text: str, names: Sequence[str]) -> Iterator[Check]:
    """A check of each row that ``text``, as :data:`CLAIMS` has it, speaks of."""
    pattern, metric, relation, *right = text.split()
    against = right[0] if len(right) == 2 else None
    rows = [row for row in fnmatch.filter(names, pattern.removeprefix("best(").rstrip(")")) if row != against]
    for group in [tuple(rows)] if pattern.startswith("best(") else [(row,) for row in rows]:
        yield Check(group, metric, relation, float(right[-1]), against)


def _always(*rows: Row) -> Callable[[Scale], tuple[Row, ...]]:
    """The same rows at every scale."""
    return lambda scale: rows


_STUDIES = (
    Study("table-trades", "TRADES with and without BulletTrain", _always(*rows.TRADES_ROWS), ROBUST, TABLE),
    Study("table-mart", "MART with and without BulletTrain", _always(*rows.MART_ROWS), ROBUST, TABLE),
    Study(
        "table-augmix",
        "AugMix with and without BulletTrain",
        _always(*rows.AUGMIX_ROWS),
        ("clean", "corruptions"),
        ("corruptions", "clean", "boundary", *RATIOS),
    ),
    Study("table-fast", "Fewer steps for all, or for some: multi-step FAST", _always(*rows.FAST_ROWS)),
    Study("fig-oracle", "Which examples need steps (MNIST, true classes)", rows.oracle_rows, ORACLE, ORACLE),
    Study(
        "fig-shares",
        "Shares of the classes over training",
        rows.looked_at,
        ("clean",),
        ("robust_rise", "outlier_fall", "boundary_least"),
        about="First to last record of training, in points; the last column is how much smaller the share of "
        "boundary examples is than the next one, at the end.",
    ),
    Study(
        "fig-svar",
        "SVar of the classes over training",
        rows.looked_at,
        ("clean",),
        ("svar_order",),
        about="The share of training records in which the three means are in order.",
    ),
    Study(
        "fig-allocation",
        "One mini-batch by SVar, and the steps it is given",
        _always(rows.TRADES_NR2),
        ("clean",),
        ("shares",),
        about="The table has the shares of the whole training, the pictures one mini-batch at its end.",
    ),
    Study("fig-gamma", "Accuracy and speed-up over γ", lambda scale: rows.sweep("gamma", "γ", scale.gammas)),
    Study("fig-nr", "Accuracy and speed-up over N_R", lambda scale: rows.sweep("robust", "N_R", scale.robust_steps)),
    Study(
        "strong-attacks",
        "Stronger attacks than those of the tables",
        _always(replace(rows.TRADES, paper=rows.BESIDE_ROBUSTBENCH), rows.TRADES_NR2),
        STRONG,
        STRONG,
        about="The figure beside AutoAttack is RobustBench's, of the TRADES authors' network.",
    ),
    Study(
        "uncertainty",
        "Other scores in the place of SVar",
        _always(*rows.SCORE_ROWS),
        ("clean", "pgd20", RANKS),
        ("clean", "pgd20", "rank", "rank_correct", "theoretical"),
        about="Rank correlation of the score with the classes that ten PGD steps find, over all training "
        "examples looked at, and over the correctly classified ones alone, where the sign does not help.",
    ),
    Study(
        "plane",
        "Accuracy under AutoAttack over training time: what a user chooses from",
        _always(*rows.PLANE_ROWS),
        ROBUST,
        (*ROBUST, "minutes", "work"),
        about="Not of the paper, but for what it says of GradAlign. Minutes are of training with the device to "
        "itself, without compilation. Methods on TRADES or MART are compared with these, the others with PGD-AT.",
    ),
    Study(
        LARGE,
        "A large network: WRN-34-10",
        rows.large_rows,
        ("clean", "pgd20", "autoattack"),
        ("clean", "pgd20", "pgd100x10", "autoattack", "boundary", "theoretical", "wall"),
        about="In the order in which they are trained. AutoAttack runs on all images for the first two rows, on 2,000 "
        "for the others; the figure beside that of TRADES is RobustBench's, of its authors' network.",
    ),
)
STUDIES = {study.name: study for study in _STUDIES}
