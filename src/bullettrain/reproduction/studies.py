"""What can be reproduced: the rows and claims of the paper's tables and figures, and the plane of all methods."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, cast

from bullettrain.checks import instead
from bullettrain.evaluation.paper import PAPER, ROBUSTBENCH_TRADES
from bullettrain.reproduction.scales import Scale
from bullettrain.training.config import Config
from bullettrain.training.methods import with_method
from bullettrain.training.recipes import recipe
from bullettrain.training.settings import ConfigError

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
    """

    name: str
    title: str
    family: str
    settings: tuple[str, ...] = ()
    plain: bool = False
    baseline: str | None = None
    method: str | None = None
    paper: Mapping[str, float] = field(default_factory=dict)

    def config(self, scale: Scale, settings: Sequence[str] = ()) -> Config:
        """The run at ``scale``, with the user's own ``settings`` on top."""
        name, base = scale.recipes[self.family]
        config = recipe(name).with_settings([*base, *self.settings, *settings])
        if self.method is not None:
            return with_method(config, self.method)
        return config.baseline() if self.plain else config


Relation = Literal["≥", "≤", "≈"]


@dataclass(frozen=True)
class Check:
    """The best of ``rows``, less the row ``against``, is ≥, ≤ or within (≈) ``offset``."""

    rows: tuple[str, ...]
    metric: str
    relation: Relation
    offset: float
    against: str | None = None


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the checks that it stands on."""

    text: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Study:
    """A table or a figure of the paper.

    Args:
        attacks: what every row is evaluated by, in the paper's names.
        columns: of its table; empty: the attacks and the speed-ups.
        figure: name of the function that draws it, in :mod:`bullettrain.reproduction.figures`.
        ranks: whether each row's score is compared with the oracle's classes.
        about: what to know when reading it.
    """

    name: str
    title: str
    attacks: tuple[str, ...]
    rows: Callable[[Scale], tuple[Row, ...]]
    claims: Callable[[Scale], tuple[Claim, ...]] = lambda scale: ()
    columns: tuple[str, ...] = ()
    figure: str | None = None
    ranks: bool = False
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


T = TypeVar("T")
ROBUST = ("clean", "pgd20", "autoattack")
TABLE = (*ROBUST, "shares", *RATIOS)
PGD_AT = ("objective=pgd-at", "beta=null")
ROLES = {"N_B": "boundary", "N_O": "outlier", "N_R": "robust"}


def _from_paper(*rows: Row) -> tuple[Row, ...]:
    """The rows with the paper's figures for them, where it has any."""
    return tuple(replace(row, paper=PAPER[row.family].get(row.name, {})) for row in rows)


def _claim(text: str, *checks: str) -> Claim:
    """A sentence of the paper; checks as `row metric ≥ bound`, or `row metric ≥ other offset` of a difference.

    Several rows, with commas between them, stand for the best of them.
    """
    return Claim(text, tuple(_check(*check.split()) for check in checks))


def _check(rows: str, metric: str, relation: str, *right: str) -> Check:
    against = right[0] if len(right) == 2 else None
    return Check(tuple(rows.split(",")), metric, cast(Relation, relation), float(right[-1]), against)


def _always(*parts: T) -> Callable[[Scale], tuple[T, ...]]:
    """The same rows or claims at every scale."""
    return lambda scale: parts


# -------------------------------------------------------------------------------------------- tables

TRADES, TRADES_NR0, TRADES_NR2 = _from_paper(
    Row("trades", "TRADES λ=1/6", "trades", plain=True),
    Row("bt-nr0", "TRADES λ=1/6 + BT, N_R=0", "trades", ("robust=0",), baseline="trades"),
    Row("bt-nr2", "TRADES λ=1/6 + BT, N_R=2", "trades", baseline="trades"),
)
TRADES_ROWS = _from_paper(
    Row("trades-1", "TRADES λ=1", "trades", ("beta=1",), plain=True),
    TRADES,
    Row("fast", "TRADES λ=1/6 + FAST", "trades", baseline="trades", method="fast"),
    Row("yopo-1", "TRADES λ=1 + YOPO-2-5", "trades", ("beta=1",), baseline="trades-1", method="yopo-2-5"),
    Row("yopo", "TRADES λ=1/6 + YOPO-2-5", "trades", baseline="trades", method="yopo-2-5"),
    TRADES_NR0,
    TRADES_NR2,
)
TRADES_CLAIMS = (
    _claim("With N_R = 2, robust accuracy is 0.3 points below TRADES at most", "bt-nr2 pgd20 ≥ trades -0.26"),
    _claim("… and clean accuracy is 1.0 point above", "bt-nr2 clean ≥ trades +0.97"),
    _claim("… 2.3 times less computation, 2.2 times less time", "bt-nr2 theoretical ≥ 2.3", "bt-nr2 wall ≥ 2.2"),
    _claim(
        "With N_R = 0, robust accuracy is 4.5 points below TRADES at most, clean accuracy 2.6 above",
        *("bt-nr0 pgd20 ≥ trades -4.51", "bt-nr0 clean ≥ trades +2.58"),
    ),
    _claim(
        "… which is no worse than TRADES with λ = 1: more robust, and at most 1.1 points less clean accuracy",
        *("bt-nr0 pgd20 ≥ trades-1 0", "bt-nr0 clean ≥ trades-1 -1.14"),
    ),
    _claim("… 3.0 times less computation, 2.7 times less time", "bt-nr0 theoretical ≥ 3.0", "bt-nr0 wall ≥ 2.7"),
    _claim("FAST fails against PGD-20 (4.5 % left)", "fast pgd20 ≤ 10"),
    _claim("YOPO-2-5 is 10 points less robust than TRADES", "yopo pgd20 ≤ trades -10.01"),
)
MART_ROWS = _from_paper(
    Row("mart", "MART", "mart", plain=True),
    Row("fast", "MART + FAST", "mart", baseline="mart", method="fast"),
    Row("bt-nr1", "MART + BT, N_R=1", "mart", ("robust=1",), baseline="mart"),
    Row("bt-nr2", "MART + BT, N_R=2", "mart", baseline="mart"),
)
MART_CLAIMS = (
    _claim("With N_R = 2, robust accuracy is 1.3 points above MART", "bt-nr2 pgd20 ≥ mart +1.35"),
    _claim("… and clean accuracy 2.4 above", "bt-nr2 clean ≥ mart +2.43"),
    _claim("… 2.2 times less computation, 1.9 times less time", "bt-nr2 theoretical ≥ 2.2", "bt-nr2 wall ≥ 1.9"),
    _claim(
        "With N_R = 1, robust accuracy is 0.7 points above MART, clean accuracy 2.9",
        *("bt-nr1 pgd20 ≥ mart +0.72", "bt-nr1 clean ≥ mart +2.95"),
    ),
    _claim("… 2.5 times less computation, 2.1 times less time", "bt-nr1 theoretical ≥ 2.5", "bt-nr1 wall ≥ 2.1"),
    _claim("FAST fails against PGD-20 (0.2 % left)", "fast pgd20 ≤ 10"),
    _claim(
        "Under AutoAttack, which the paper did not run, robust accuracy is above MART's, too",
        "bt-nr2 autoattack ≥ mart 0",
    ),
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


AUGMIX_CLAIMS = (
    _claim("On CIFAR-10-C, accuracy is AugMix's", "bt-10 corruptions ≥ augmix-10 0"),
    _claim("On CIFAR-100-C, it is 0.4 points below at most", "bt-100 corruptions ≥ augmix-100 -0.4"),
    _claim(
        "It is 1.9 and 3.4 points above AugMix without JSD",
        *("bt-10 corruptions ≥ no-jsd-10 +1.9", "bt-100 corruptions ≥ no-jsd-100 +3.4"),
    ),
    _claim(
        "Views are made for no more than 35 and 36 % of the examples", "bt-10 boundary ≤ 35", "bt-100 boundary ≤ 36"
    ),
    _claim(
        "1.8 times less computation, 1.7 times less time",
        *("bt-10 theoretical ≥ 1.8", "bt-10 wall ≥ 1.69", "bt-100 theoretical ≥ 1.8", "bt-100 wall ≥ 1.67"),
    ),
)


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


def _beside_fast(metric: str) -> list[str]:
    return [f"bt-nb{n + 1} {metric} ≥ fast-{n} 0" for n in range(2, 6)]


FAST_CLAIMS = (
    _claim(
        "For N_B = 3 to 6, robust accuracy stays within 0.9 points of TRADES",
        *(f"bt-nb{n} pgd20 ≥ trades -0.84" for n in range(3, 7)),
    ),
    _claim("… and is above that of multi-step FAST at the same place of the table", *_beside_fast("pgd20")),
    _claim("… as is clean accuracy", *_beside_fast("clean")),
    _claim("… and the theoretical speed-up", *_beside_fast("theoretical")),
    _claim(
        "At 3 times less computation, N_B = 5 beside N = 3, it is 1.4 points cleaner and 2.2 more robust",
        *("bt-nb5 clean ≥ fast-3 +1.4", "bt-nb5 pgd20 ≥ fast-3 +2.2"),
    ),
    _claim(
        "Its wall-clock speed-up is like multi-step FAST's where the theoretical ones are close (to 0.1)",
        *("bt-nb3 wall ≥ fast-2 -0.1", "bt-nb6 wall ≥ fast-3 -0.1"),
    ),
)

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


def _oracle_claims(scale: Scale) -> tuple[Claim, ...]:
    best = {zero: f"{','.join(row.name for row in panel_rows(scale, zero))} pgd100x20" for zero in ROLES}
    return (
        _claim("Without steps for boundary examples, robust accuracy is under 40 %", f"{best['N_B']} ≤ 40"),
        _claim("Without steps for outliers, the best is 1.0 point above the baseline", f"{best['N_O']} ≥ baseline +1"),
        _claim(
            "Without steps for robust examples, the best is 1.4 points below it at most",
            f"{best['N_R']} ≥ baseline -1.4",
        ),
    )


def _looked_at(scale: Scale) -> tuple[Row, ...]:
    """The runs whose shares and scores are drawn: TRADES as it is used, and the MNIST study's, by the oracle."""
    most = max(scale.grid)
    oracle = _oracle_row({"N_B": most, "N_O": 0, "N_R": most})
    return TRADES_NR2, Row("mnist-oracle", "PGD-AT, classes by oracle", "mnist", oracle.settings)


SHARES_CLAIMS = (
    _claim("The share of robust examples grows", "bt-nr2 robust_rise ≥ 0", "mnist-oracle robust_rise ≥ 0"),
    _claim("The share of outliers falls", "bt-nr2 outlier_fall ≥ 0", "mnist-oracle outlier_fall ≥ 0"),
    _claim("On MNIST, boundary examples are the smallest class at the end", "mnist-oracle boundary_least ≥ 0"),
)
SVAR_CLAIM = _claim(
    "The mean SVar of outliers is below that of boundary examples, and that below robust ones', mostly",
    *("bt-nr2 svar_order ≥ 95", "mnist-oracle svar_order ≥ 95"),
)


def _gamma_rows(scale: Scale) -> tuple[Row, ...]:
    rows = (
        Row(f"gamma-{gamma:g}", f"TRADES + BT, γ={gamma:g}", "trades", (f"gamma={gamma:g}",), baseline="trades")
        for gamma in scale.gammas
    )
    return TRADES, *rows


def _gamma_claims(scale: Scale) -> tuple[Claim, ...]:
    text = "accuracy is not sensitive to γ (within a point of that at γ = 0.8)"
    others = [f"gamma-{gamma:g}" for gamma in scale.gammas if gamma != 0.8]
    return (
        _claim(f"Clean {text}", *(f"{row} clean ≈ gamma-0.8 1" for row in others)),
        _claim(f"Robust {text}", *(f"{row} pgd20 ≈ gamma-0.8 1" for row in others)),
    )


def _nr_rows(scale: Scale) -> tuple[Row, ...]:
    rows = (
        Row(f"nr-{n}", f"TRADES + BT, N_R={n}", "trades", (f"robust={n}",), baseline="trades")
        for n in scale.robust_steps
    )
    return TRADES, *rows


def _nr_claims(scale: Scale) -> tuple[Claim, ...]:
    low, high = f"nr-{min(scale.robust_steps)}", f"nr-{max(scale.robust_steps)}"
    both = f"{low} clean ≥ {high} 0", f"{low} theoretical ≥ {high} 0"
    return (
        _claim("A smaller N_R raises clean accuracy and the speed-up", *both),
        _claim("… and lowers robust accuracy", f"{high} pgd20 ≥ {low} 0"),
        _claim("… but not by much: even N_R = 0 is within 4.5 points of TRADES", f"{low} pgd20 ≥ trades -4.51"),
    )


# ------------------------------------------------------------------------------- statements in its text

STRONG = ("clean", "pgd20", "pgd100x10", "pgd1000x5", "autoattack")
STRONG_CLAIMS = (
    _claim("Under PGD-100 with 10 restarts, both are equal", "bt-nr2 pgd100x10 ≥ trades -0.01"),
    _claim("Under PGD-1000 with 5 restarts, 0.1 points apart", "bt-nr2 pgd1000x5 ≥ trades -0.08"),
    _claim(
        "Under AutoAttack, which the paper did not run, 0.3 points apart at most", "bt-nr2 autoattack ≥ trades -0.26"
    ),
)
SCORE_ROWS = (
    TRADES,
    Row("svar", "TRADES + BT by SVar", "trades", baseline="trades"),
    Row("cross-entropy", "TRADES + BT by cross-entropy", "trades", ("score=cross-entropy",), baseline="trades"),
    Row("margin", "TRADES + BT by margin", "trades", ("score=margin",), baseline="trades"),
    Row("gradient-norm", "TRADES + BT by gradient norm", "trades", ("score=gradient-norm",), baseline="trades"),
    Row("random", "TRADES + BT by chance", "trades", ("score=random",), baseline="trades"),
)
OTHER_SCORES = ("cross-entropy", "margin", "gradient-norm")
SCORE_CLAIMS = (
    _claim(
        "Other scores give comparable robust accuracy (within a point of SVar's)",
        *(f"{row} pgd20 ≈ svar 1" for row in OTHER_SCORES),
    ),
    _claim(
        "… and order examples as well as SVar does, measured by the oracle's classes",
        *(f"{row} rank ≈ svar 0.05" for row in OTHER_SCORES),
    ),
    _claim("Any of them orders better than chance", "svar rank ≥ random +0.1"),
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
PLANE_CLAIM = _claim(
    "With GradAlign, FAST is not more robust (the paper does not say on which objective; here on PGD-AT)",
    "grad-align pgd20 ≤ fast 0",
)

_STUDIES = (
    Study(
        "table-trades",
        "TRADES with and without BulletTrain",
        ROBUST,
        _always(*TRADES_ROWS),
        _always(*TRADES_CLAIMS),
        TABLE,
    ),
    Study("table-mart", "MART with and without BulletTrain", ROBUST, _always(*MART_ROWS), _always(*MART_CLAIMS), TABLE),
    Study(
        "table-augmix",
        "AugMix with and without BulletTrain",
        ("clean", "corruptions"),
        _augmix_rows,
        _always(*AUGMIX_CLAIMS),
        ("corruptions", "clean", "boundary", *RATIOS),
        figure="corrupted",
    ),
    Study(
        "table-fast",
        "Fewer steps for all, or for some: multi-step FAST",
        ("clean", "pgd20"),
        _fast_rows,
        _always(*FAST_CLAIMS),
    ),
    Study(
        "fig-oracle",
        "Which examples need steps (MNIST, true classes)",
        ("clean", "pgd100x20"),
        _oracle_rows,
        _oracle_claims,
        ("clean", "pgd100x20"),
        figure="oracle",
    ),
    Study(
        "fig-shares",
        "Shares of the classes over training",
        ("clean",),
        _looked_at,
        _always(*SHARES_CLAIMS),
        ("robust_rise", "outlier_fall", "boundary_least"),
        figure="shares",
        about="First to last record of training, in points; the last column is how much smaller the share of "
        "boundary examples is than the next one, at the end.",
    ),
    Study(
        "fig-svar",
        "SVar of the classes over training",
        ("clean",),
        _looked_at,
        _always(SVAR_CLAIM),
        ("svar_order",),
        figure="svar",
        about="The share of training records in which the three means are in order.",
    ),
    Study(
        "fig-allocation",
        "One mini-batch by SVar, and the steps it is given",
        ("clean",),
        _always(TRADES_NR2),
        columns=("shares",),
        figure="allocation",
        about="The table has the shares of the whole training, the pictures one mini-batch at its end.",
    ),
    Study("fig-gamma", "Accuracy and speed-up over γ", ("clean", "pgd20"), _gamma_rows, _gamma_claims, figure="gamma"),
    Study("fig-nr", "Accuracy and speed-up over N_R", ("clean", "pgd20"), _nr_rows, _nr_claims, figure="robust_steps"),
    Study(
        "strong-attacks",
        "Stronger attacks than those of the tables",
        STRONG,
        _always(replace(TRADES, paper={**TRADES.paper, "autoattack": ROBUSTBENCH_TRADES}), TRADES_NR2),
        _always(*STRONG_CLAIMS),
        STRONG,
        about="The figure beside AutoAttack is RobustBench's, of the TRADES authors' network.",
    ),
    Study(
        "uncertainty",
        "Other scores in the place of SVar",
        ("clean", "pgd20"),
        _always(*SCORE_ROWS),
        _always(*SCORE_CLAIMS),
        ("clean", "pgd20", "rank", "rank_correct", "theoretical"),
        figure="ranks",
        ranks=True,
        about="Rank correlation of the score with the classes that ten PGD steps find, over all training "
        "examples looked at, and over the correctly classified ones alone, where the sign does not help.",
    ),
    Study(
        "plane",
        "Accuracy under AutoAttack over training time: what a user chooses from",
        ROBUST,
        _always(*PLANE_ROWS),
        _always(PLANE_CLAIM),
        (*ROBUST, "minutes", "work"),
        figure="plane",
        about="Not of the paper, but for what it says of GradAlign. Minutes are of training with the device to "
        "itself, without compilation. Methods on TRADES or MART are compared with these, the others with PGD-AT.",
    ),
)
STUDIES = {study.name: study for study in _STUDIES}


def find_study(name: str) -> Study:
    """The study called ``name``; ConfigError with what there is otherwise."""
    if name not in STUDIES:
        raise ConfigError(f"there is nothing called {name!r} to reproduce{instead(name, STUDIES)}")
    return STUDIES[name]
