"""What can be reproduced: the rows and claims of the paper's tables and figures, and the plane of all methods."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bullettrain.config.methods import with_method
from bullettrain.config.recipes import recipe
from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError
from bullettrain.reporting.paper import CLAIMS, PAPER, ROBUSTBENCH_TRADES
from bullettrain.reproduction.scales import Scale

SHARES = ("boundary", "robust", "outlier")
"""The classes of examples, in the order in which the paper has their shares."""
RATIOS = ("theoretical", "work", "wall")
"""Speed-ups, against a row's baseline."""


@dataclass(frozen=True)
class Row:
    """One line of a table or point of a figure: a recipe with settings, and the paper's figures for it.

    Args:
        family: which of a scale's recipes it changes.
        settings: as `--set` takes them.
        plain: the full number of steps for everyone, whatever the recipe says.
        baseline: the row that it is compared with.
        method: what the recipe is trained by instead, as `--method` takes it: fast, fast-3, yopo-2-5.
        paper: by metric: accuracies and shares in percent, speed-ups as ratios.
        attacks: what it is evaluated by besides the study's, in the paper's names.
        images: test images for attacks that training does not end with; None: as the scale has it.
    """

    name: str
    title: str
    family: str
    settings: tuple[str, ...] = ()
    plain: bool = False
    baseline: str | None = None
    method: str | None = None
    paper: Mapping[str, float] = field(default_factory=dict)
    attacks: tuple[str, ...] = ()
    images: int | None = None

    def config(self, scale: Scale, settings: Sequence[str] = ()) -> Config:
        """The run at ``scale``, with the user's own ``settings`` on top."""
        name, base = scale.recipes[self.family]
        config = recipe(name).with_settings([*base, *self.settings, *settings])
        if self.method is not None:
            return with_method(config, self.method)
        return config.baseline() if self.plain else config


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
        return {
            text: [part for one in checks.split("; ") for part in _checks(one, rows)] for text, checks in claims.items()
        }


def _checks(text: str, names: Sequence[str]) -> Iterator[Check]:
    """A check of each row that ``text``, as :data:`CLAIMS` has it, speaks of."""
    pattern, metric, relation, *right = text.split()
    against = right[0] if len(right) == 2 else None
    rows = [row for row in fnmatch.filter(names, pattern.removeprefix("best(").rstrip(")")) if row != against]
    for group in [tuple(rows)] if pattern.startswith("best(") else [(row,) for row in rows]:
        yield Check(group, metric, relation, float(right[-1]), against)


RANKS = "ranks"
"""In the place of an attack: how the row's score orders examples, beside the oracle's classes."""
LARGE = "large-network"
"""What `reproduce --scale medium` and `paper` run where no name is given."""
ROBUST = ("clean", "pgd20", "autoattack")
TABLE = (*ROBUST, "shares", *RATIOS)
PGD_AT = ("objective=pgd-at", "beta=null")
ROLES = {"N_B": "boundary", "N_O": "outlier", "N_R": "robust"}


def _from_paper(*rows: Row) -> tuple[Row, ...]:
    """The rows with the paper's figures for them, where it has any."""
    return tuple(replace(row, paper=row.paper or PAPER[row.family].get(row.name, {})) for row in rows)


def _always(*rows: Row) -> Callable[[Scale], tuple[Row, ...]]:
    """The same rows at every scale."""
    return lambda scale: rows


# -------------------------------------------------------------------------------------------- tables

TRADES_ROWS = _from_paper(
    Row("trades-1", "TRADES λ=1", "trades", ("beta=1",), plain=True),
    Row("trades", "TRADES λ=1/6", "trades", plain=True),
    Row("fast", "TRADES λ=1/6 + FAST", "trades", baseline="trades", method="fast"),
    Row("yopo-1", "TRADES λ=1 + YOPO-2-5", "trades", ("beta=1",), baseline="trades-1", method="yopo-2-5"),
    Row("yopo", "TRADES λ=1/6 + YOPO-2-5", "trades", baseline="trades", method="yopo-2-5"),
    Row("bt-nr0", "TRADES λ=1/6 + BT, N_R=0", "trades", ("robust=0",), baseline="trades"),
    Row("bt-nr2", "TRADES λ=1/6 + BT, N_R=2", "trades", baseline="trades"),
)
TRADES, TRADES_NR2 = TRADES_ROWS[1], TRADES_ROWS[-1]
BESIDE_ROBUSTBENCH = {**TRADES.paper, "autoattack": ROBUSTBENCH_TRADES}
MART_ROWS = _from_paper(
    Row("mart", "MART", "mart", plain=True),
    Row("fast", "MART + FAST", "mart", baseline="mart", method="fast"),
    Row("bt-nr1", "MART + BT, N_R=1", "mart", ("robust=1",), baseline="mart"),
    Row("bt-nr2", "MART + BT, N_R=2", "mart", baseline="mart"),
)


def _augmix_rows(scale: Scale) -> tuple[Row, ...]:
    """The six cells of the AugMix table, a row each, and two of ours."""
    rows: list[Row] = []
    for n in ("10", "100"):
        family, base, data = f"augmix{n}", f"augmix-{n}", f"CIFAR-{n}"
        no_jsd = ("jsd=false", "robust=1", "outlier=1")
        rows += [
            Row(base, f"AugMix, {data}", family, plain=True),
            Row(f"no-jsd-{n}", f"AugMix − JSD, {data}", family, no_jsd, baseline=base),
            Row(f"bt-{n}", f"AugMix + BT, {data}", family, baseline=base),
            Row(f"bt-views-{n}", f"AugMix + BT, images as views, {data}", family, ("data.views=true",), baseline=base),
        ]
    return _from_paper(*rows)


def _fewer(steps: int) -> tuple[str, ...]:
    """N_B = ``steps``, with a step size as multi-step FAST has it: the paper gives neither that nor γ."""
    return f"boundary={steps}", "gamma=0.75", "scale=1.7"


def _fast_rows(scale: Scale) -> tuple[Row, ...]:
    """Multi-step FAST, N = 2 to 5, and BulletTrain, N_B = 3 to 6."""
    rows = [
        Row(f"fast-{n}", f"TRADES + FAST, N={n}", "trades", baseline="trades", method=f"fast-{n}") for n in range(2, 6)
    ]
    rows += [Row(f"bt-nb{n}", f"TRADES + BT, N_B={n}", "trades", _fewer(n), baseline="trades") for n in range(3, 7)]
    return _from_paper(TRADES, *rows)


# ------------------------------------------------------------------------------------------- figures


def panel_rows(scale: Scale, zero: str) -> tuple[Row, ...]:
    """The rows of the MNIST study in which ``zero`` of "N_B", "N_O", "N_R" is 0, first of the others slowest."""
    first, second = (role for role in ROLES if role != zero)
    return tuple(_oracle_row({zero: 0, first: a, second: b}) for a in scale.grid for b in scale.grid)


def _oracle_row(steps: dict[str, int]) -> Row:
    name = "-".join(f"{role[-1].lower()}{steps[role]}" for role in ROLES)
    settings = tuple(f"{setting}={steps[role]}" for role, setting in ROLES.items())
    title = ", ".join(f"{role}={steps[role]}" for role in ROLES)
    return Row(name, title, "mnist", (*settings, "ordered=false"), baseline="baseline")


def _oracle_rows(scale: Scale) -> tuple[Row, ...]:
    """The MNIST study: its baseline, and every point of three grids, each once."""
    base = Row("baseline", "PGD-AT, seven steps for all", "mnist", plain=True)
    grids = {row.name: row for zero in ROLES for row in panel_rows(scale, zero)}
    return _from_paper(base, *grids.values())


def _looked_at(scale: Scale) -> tuple[Row, ...]:
    """The runs whose shares and scores are drawn: TRADES as it is used, and the MNIST study's, by the oracle."""
    most = max(scale.grid)
    oracle = _oracle_row({"N_B": most, "N_O": 0, "N_R": most})
    return TRADES_NR2, Row("mnist-oracle", "PGD-AT, classes by oracle", "mnist", oracle.settings)


def _sweep(setting: str, symbol: str, values: Sequence[float]) -> tuple[Row, ...]:
    """TRADES, and with BulletTrain at each of several values of a setting."""
    name = {"robust": "nr"}.get(setting, setting)
    rows = [
        Row(f"{name}-{v:g}", f"TRADES + BT, {symbol}={v:g}", "trades", (f"{setting}={v:g}",), baseline="trades")
        for v in values
    ]
    return TRADES, *rows


# ------------------------------------------------------------------------------- statements in its text

ORACLE = ("clean", "pgd100x20")
STRONG = ("clean", "pgd20", "pgd100x10", "pgd1000x5", "autoattack")
SCORE_ROWS = (
    TRADES,
    Row("svar", "TRADES + BT by SVar", "trades", baseline="trades"),
    Row("cross-entropy", "TRADES + BT by cross-entropy", "trades", ("score=cross-entropy",), baseline="trades"),
    Row("margin", "TRADES + BT by margin", "trades", ("score=margin",), baseline="trades"),
    Row("gradient-norm", "TRADES + BT by gradient norm", "trades", ("score=gradient-norm",), baseline="trades"),
    Row("random", "TRADES + BT by chance", "trades", ("score=random",), baseline="trades"),
)
PLANE_ROWS = (
    Row("trades", "TRADES", "trades", plain=True),
    Row("bt-nr2", "TRADES + BT", "trades", baseline="trades"),
    Row("bt-nr0", "TRADES + BT, N_R=0", "trades", ("robust=0",), baseline="trades"),
    Row("mart", "MART", "mart", plain=True),
    Row("mart-bt", "MART + BT", "mart", baseline="mart"),
    Row("pgd-at", "PGD-AT", "trades", PGD_AT, plain=True),
    Row("pgd-at-bt", "PGD-AT + BT", "trades", PGD_AT, baseline="pgd-at"),
    Row("pgd-at-bt-nb4", "PGD-AT + BT, N_B=4", "trades", (*PGD_AT, *_fewer(4)), baseline="pgd-at"),
    Row("fast", "FAST", "trades", PGD_AT, baseline="pgd-at", method="fast"),
    Row("n-fgsm", "N-FGSM", "trades", PGD_AT, baseline="pgd-at", method="n-fgsm"),
    Row("free", "Free", "trades", PGD_AT, baseline="pgd-at", method="free-8"),
    Row("grad-align", "GradAlign", "trades", PGD_AT, baseline="pgd-at", method="grad-align"),
    Row("trades-fast", "TRADES + FAST", "trades", baseline="trades", method="fast"),
    Row("trades-fast-3", "TRADES + FAST, N=3", "trades", baseline="trades", method="fast-3"),
    Row("yopo", "TRADES + YOPO-2-5", "trades", baseline="trades", method="yopo-2-5"),
)


# -------------------------------------------------------------------------------- the paper's own network


def _large_rows(scale: Scale) -> tuple[Row, ...]:
    """What is trained of WRN-34-10, the first first: at the paper's own scale, and at the others."""
    bullettrain = "TRADES + BulletTrain"
    rows = {
        row.name: row
        for row in _from_paper(
            Row("trades", "TRADES, 10 steps for all", "trades", plain=True, paper=BESIDE_ROBUSTBENCH),
            Row("fast-3", "TRADES, 3 steps for all", "trades", baseline="trades", method="fast-3"),
            Row("bt-nr2", f"{bullettrain} 10/2", "trades", baseline="trades"),
            Row("random", f"{bullettrain} 10/2 by chance", "trades", ("score=random",), baseline="trades"),
            Row("bt-nb5", f"{bullettrain} 5/2, γ=0.75", "trades", _fewer(5), baseline="trades"),
            Row("bt-nr0", f"{bullettrain} 10/0", "trades", ("robust=0",), baseline="trades"),
            Row("fast", "TRADES + FAST", "trades", baseline="trades", method="fast"),
            Row("pgd-at", "PGD-AT, 10 steps for all", "trades", PGD_AT, plain=True),
            Row("pgd-at-3", "PGD-AT, 3 steps for all", "trades", PGD_AT, baseline="pgd-at", method="fast-3"),
            Row("pgd-at-bt", "PGD-AT + BulletTrain 10/2", "trades", PGD_AT, baseline="pgd-at"),
            Row("mart", "MART, 10 steps for all", "mart", plain=True),
            Row("mart-bt", "MART + BulletTrain 10/2", "mart", baseline="mart", paper=PAPER["mart"]["bt-nr2"]),
        )
    }
    chosen = "trades bt-nr2 fast-3 random bt-nb5 pgd-at pgd-at-3 pgd-at-bt"
    if scale.name == "paper":
        chosen = "bt-nr2 bt-nb5 trades fast-3 random mart mart-bt bt-nr0 fast"
    first, second, *others = (rows[name] for name in chosen.split())
    whole = (replace(row, attacks=("pgd100x10",)) for row in (first, second))
    return *whole, *(replace(row, images=2000) for row in others)


_STUDIES = (
    Study("table-trades", "TRADES with and without BulletTrain", _always(*TRADES_ROWS), ROBUST, TABLE),
    Study("table-mart", "MART with and without BulletTrain", _always(*MART_ROWS), ROBUST, TABLE),
    Study(
        "table-augmix",
        "AugMix with and without BulletTrain",
        _augmix_rows,
        ("clean", "corruptions"),
        ("corruptions", "clean", "boundary", *RATIOS),
    ),
    Study("table-fast", "Fewer steps for all, or for some: multi-step FAST", _fast_rows),
    Study("fig-oracle", "Which examples need steps (MNIST, true classes)", _oracle_rows, ORACLE, ORACLE),
    Study(
        "fig-shares",
        "Shares of the classes over training",
        _looked_at,
        ("clean",),
        ("robust_rise", "outlier_fall", "boundary_least"),
        about="First to last record of training, in points; the last column is how much smaller the share of "
        "boundary examples is than the next one, at the end.",
    ),
    Study(
        "fig-svar",
        "SVar of the classes over training",
        _looked_at,
        ("clean",),
        ("svar_order",),
        about="The share of training records in which the three means are in order.",
    ),
    Study(
        "fig-allocation",
        "One mini-batch by SVar, and the steps it is given",
        _always(TRADES_NR2),
        ("clean",),
        ("shares",),
        about="The table has the shares of the whole training, the pictures one mini-batch at its end.",
    ),
    Study("fig-gamma", "Accuracy and speed-up over γ", lambda scale: _sweep("gamma", "γ", scale.gammas)),
    Study("fig-nr", "Accuracy and speed-up over N_R", lambda scale: _sweep("robust", "N_R", scale.robust_steps)),
    Study(
        "strong-attacks",
        "Stronger attacks than those of the tables",
        _always(replace(TRADES, paper=BESIDE_ROBUSTBENCH), TRADES_NR2),
        STRONG,
        STRONG,
        about="The figure beside AutoAttack is RobustBench's, of the TRADES authors' network.",
    ),
    Study(
        "uncertainty",
        "Other scores in the place of SVar",
        _always(*SCORE_ROWS),
        ("clean", "pgd20", RANKS),
        ("clean", "pgd20", "rank", "rank_correct", "theoretical"),
        about="Rank correlation of the score with the classes that ten PGD steps find, over all training "
        "examples looked at, and over the correctly classified ones alone, where the sign does not help.",
    ),
    Study(
        "plane",
        "Accuracy under AutoAttack over training time: what a user chooses from",
        _always(*PLANE_ROWS),
        ROBUST,
        (*ROBUST, "minutes", "work"),
        about="Not of the paper, but for what it says of GradAlign. Minutes are of training with the device to "
        "itself, without compilation. Methods on TRADES or MART are compared with these, the others with PGD-AT.",
    ),
    Study(
        LARGE,
        "A large network: WRN-34-10",
        _large_rows,
        ("clean", "pgd20", "autoattack"),
        ("clean", "pgd20", "pgd100x10", "autoattack", "boundary", "theoretical", "wall"),
        about="In the order in which they are trained. AutoAttack runs on all images for the first two rows, on 2,000 "
        "for the others; the figure beside that of TRADES is RobustBench's, of its authors' network.",
    ),
)
STUDIES = {study.name: study for study in _STUDIES}
