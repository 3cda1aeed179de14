"""The studies that can be reproduced: the paper's tables and figures with its claims, and two of our own."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from bullettrain.config.settings import ConfigError
from bullettrain.reporting.paper import CLAIMS
from bullettrain.reproduction import rows
from bullettrain.reproduction.rows import Row
from bullettrain.reproduction.scales import Scale

SHARES = ("boundary", "robust", "outlier")
"""The categories, in the order of the paper's tables."""
RATIOS = ("theoretical", "work", "wall")
"""Speed-ups over the baseline of a row."""
CHANGES = ("robust_rise", "outlier_fall", "boundary_least")
"""Changes of the shares over training."""
RANKS = "ranks"
"""Listed like an attack: the rank correlation of the score with the oracle's categories."""
LARGE = "large-network"
"""The study that `reproduce --scale medium` and `paper` run without a name."""
ROBUST = ("clean", "pgd20", "autoattack")
TABLE = (*ROBUST, "shares", *RATIOS)
ORACLE, ORACLE_FEW = ("clean", "pgd100x20"), ("clean", "pgd100x5")
STRONG = ("clean", "pgd20", "pgd100x10", "pgd1000x5", "autoattack")
AUGMIX = ("clean", "corruptions")
CORRUPTED = ("corruptions", "clean", "boundary", *RATIOS)
SCORES = ("clean", "pgd20", "rank", "rank_correct", "theoretical")
LARGE_TABLE = ("clean", "pgd20", "pgd100x10", "apgd", "autoattack", "boundary", "theoretical", "wall")
ABOUT = {
    "fig-oracle-clean": "300 clean updates, then the full ε at a fifth of the learning rate; on 2,000 test images.",
    "fig-oracle-stop": "As the MNIST code of fast adversarial training (Wong et al., 2020): batches of 100, a learning "
    "rate that rises to 0.005 in two fifths of the training and then falls to 0, the full ε from the start, and an "
    "attack stops where the example is misclassified; on 2,000 test images. That code trains for ten epochs, as scale "
    "paper does; the other scales train for five.",
    "fig-shares": "First to last record of training, in points; the last column is how much smaller the share of "
    "boundary examples is than the next one, at the end.",
    "fig-svar": "The share of training records in which the three means are in order.",
    "fig-allocation": "The table has the shares of the whole training, the pictures one mini-batch at its end.",
    "strong-attacks": "The figure beside AutoAttack is RobustBench's, of the TRADES authors' network.",
    "uncertainty": "Rank correlation of the score with the categories that ten PGD steps find, over all training "
    "examples looked at, and over the correctly classified ones alone, where the sign does not help.",
    "plane": "Not of the paper, but for what it says of GradAlign. Minutes are of training with the device to "
    "itself, without compilation. Methods on TRADES or MART are compared with these, the others with PGD-AT.",
    LARGE: "In the order in which they are trained. APGD is AutoAttack's first two attacks. The first two rows get all "
    "attacks on all images, the others APGD on 2,000; the figure beside AutoAttack of TRADES is RobustBench's, of its "
    "authors' network.",
}
"""Notes for readers, by study."""


@dataclass(frozen=True)
class Check:
    """The best of ``rows``, minus the row ``against``, is ≥, ≤ or within (≈) ``offset``."""

    rows: tuple[str, ...]
    metric: str
    relation: str
    offset: float
    against: str | None = None


@dataclass(frozen=True)
class Study:
    """A table or a figure of the paper.

    Args:
        rows: returns the rows at a scale.
        attacks: attacks on every row, by the paper's names. Baselines have no RANKS.
        columns: columns of the table; empty for the attacks and the speed-ups.
        about: note for readers.
    """

    name: str
    title: str
    rows: Callable[[Scale], tuple[Row, ...]]
    attacks: tuple[str, ...] = ("clean", "pgd20")
    columns: tuple[str, ...] = ()
    about: str = ""

    def chosen(self, scale: Scale, patterns: Sequence[str]) -> list[Row]:
        """Return the rows that match ``patterns``, in which * matches any text; all rows without patterns."""
        rows = {row.name: row for row in self.rows(scale)}
        for pattern in patterns:
            if not fnmatch.filter(rows, pattern):
                names = ", ".join(rows)
                raise ConfigError(f"{self.name} has no row {pattern!r} at scale {scale.name}; there are {names}")
        chosen = {name for pattern in patterns or ["*"] for name in fnmatch.filter(rows, pattern)}
        return [row for name, row in rows.items() if name in chosen]

    def claims(self, scale: Scale) -> dict[str, list[Check]]:
        """Return the paper's claims, each with its checks."""
        rows = [row.name for row in self.rows(scale)]
        return {text: list(_checks(checks, rows)) for text, checks in CLAIMS.get(self.name, {}).items()}


def _checks(claim: str, names: Sequence[str]) -> Iterator[Check]:
    """Yield the checks of ``claim``, a value of :data:`CLAIMS`, one for each row that it is about."""
    for text in claim.split("; "):
        pattern, metric, relation, *right = text.split()
        against = right[0] if len(right) == 2 else None
        rows = [row for row in fnmatch.filter(names, pattern.removeprefix("best(").rstrip(")")) if row != against]
        for group in [tuple(rows)] if pattern.startswith("best(") else [(row,) for row in rows]:
            yield Check(group, metric, relation, float(right[-1]), against)


_STRONG_ROWS = (replace(rows.TRADES, paper=rows.BESIDE_ROBUSTBENCH), rows.TRADES_NR2)
_PLANE = "Accuracy under AutoAttack over training time: what a user chooses from"
_BATCH = "One mini-batch by SVar, and the steps it is given"
_NEED, _FEW = "Which examples need steps", (ORACLE_FEW, ORACLE_FEW)
_SCORED = ("clean", "pgd20", RANKS)
_STUDIES = (
    Study("table-trades", "TRADES with and without BulletTrain", lambda _: rows.TRADES_ROWS, ROBUST, TABLE),
    Study("table-mart", "MART with and without BulletTrain", lambda _: rows.MART_ROWS, ROBUST, TABLE),
    Study("table-augmix", "AugMix with and without BulletTrain", lambda _: rows.AUGMIX_ROWS, AUGMIX, CORRUPTED),
    Study("table-fast", "Fewer steps for all, or for some: multi-step FAST", lambda _: rows.FAST_ROWS),
    Study("fig-oracle", f"{_NEED} (MNIST, true categories)", rows.oracle_rows, ORACLE, ORACLE),
    Study("fig-oracle-clean", f"{_NEED}, clean start", partial(rows.oracle_rows, family="mnist-clean"), *_FEW),
    Study(
        "fig-oracle-stop", f"{_NEED}, attacks stop at success", partial(rows.oracle_rows, family="mnist-stop"), *_FEW
    ),
    Study("fig-shares", "Shares of the categories over training", rows.looked_at, ("clean",), CHANGES),
    Study("fig-svar", "SVar of the categories over training", rows.looked_at, ("clean",), ("svar_order",)),
    Study("fig-allocation", _BATCH, lambda _: (rows.TRADES_NR2,), ("clean",), ("shares",)),
    Study("fig-gamma", "Accuracy and speed-up over γ", lambda at: rows.sweep("gamma", "gamma", "γ", at.gammas)),
    Study("fig-nr", "Accuracy and speed-up over N_R", lambda at: rows.sweep("nr", "robust", "N_R", at.robust_steps)),
    Study("strong-attacks", "Stronger attacks than those of the tables", lambda _: _STRONG_ROWS, STRONG, STRONG),
    Study("uncertainty", "Other scores in the place of SVar", lambda _: rows.SCORE_ROWS, _SCORED, SCORES),
    Study("plane", _PLANE, lambda _: rows.PLANE_ROWS, ROBUST, (*ROBUST, "minutes", "work")),
    Study(LARGE, "A large network: WRN-34-10", rows.large_rows, columns=LARGE_TABLE),
)
STUDIES = {study.name: replace(study, about=ABOUT.get(study.name, "")) for study in _STUDIES}
