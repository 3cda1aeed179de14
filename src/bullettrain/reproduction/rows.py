"""The rows of the paper's tables and figures. Each is a recipe with settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bullettrain.config.methods import with_method
from bullettrain.config.recipes import recipe
from bullettrain.config.sections import Config
from bullettrain.reporting.paper import PAPER, ROBUSTBENCH_TRADES
from bullettrain.reproduction.scales import Scale

PGD_AT = ("objective=pgd-at", "beta=null")
ROLES = {"N_B": "boundary", "N_O": "outlier", "N_R": "robust"}


@dataclass(frozen=True)
class Row:
    """A row of a table or point of a figure.

    Args:
        name: name for `--rows`.
        title: title in tables.
        family: key of the recipe in ``Scale.recipes``.
        settings: changes of the recipe, as `--set` takes them.
        baseline: name of the row to compare with. A row without one is a baseline, trained without BulletTrain.
        method: another method for the recipe, as `--method` takes it.
        paper: the paper's figures by metric: accuracies and shares in percent, speed-ups as ratios.
        attacks: further attacks besides those of the study.
        images: number of test images for attacks after training; None for that of the scale.
    """

    name: str
    title: str
    family: str
    settings: tuple[str, ...] = ()
    baseline: str | None = None
    method: str | None = None
    paper: Mapping[str, float] = field(default_factory=dict)
    attacks: tuple[str, ...] = ()
    images: int | None = None

    def config(self, scale: Scale, settings: Sequence[str] = ()) -> Config:
        """Return the config of the row at ``scale``, with the user's ``settings``."""
        name, base = scale.recipes[self.family]
        config = recipe(name).with_settings([*base, *self.settings, *settings])
        if self.method is not None:
            return with_method(config, self.method)
        return config.baseline() if self.baseline is None else config


def _from_paper(*rows: Row) -> tuple[Row, ...]:
    """Return the rows with the paper's figures, if it has any."""
    return tuple(replace(row, paper=row.paper or PAPER.get(row.family, {}).get(row.name, {})) for row in rows)


# -------------------------------------------------------------------------------------------- tables

TRADES_ROWS = _from_paper(
    Row("trades-1", "TRADES λ=1", "trades", ("beta=1",)),
    Row("trades", "TRADES λ=1/6", "trades"),
    Row("fast", "TRADES λ=1/6 + FAST", "trades", baseline="trades", method="fast"),
    Row("yopo-1", "TRADES λ=1 + YOPO-2-5", "trades", ("beta=1",), baseline="trades-1", method="yopo-2-5"),
    Row("yopo", "TRADES λ=1/6 + YOPO-2-5", "trades", baseline="trades", method="yopo-2-5"),
    Row("bt-nr0", "TRADES λ=1/6 + BT, N_R=0", "trades", ("robust=0",), baseline="trades"),
    Row("bt-nr2", "TRADES λ=1/6 + BT, N_R=2", "trades", baseline="trades"),
)
TRADES, TRADES_NR2 = TRADES_ROWS[1], TRADES_ROWS[-1]
BESIDE_ROBUSTBENCH = {**TRADES.paper, "autoattack": ROBUSTBENCH_TRADES}
MART_ROWS = _from_paper(
    Row("mart", "MART", "mart"),
    Row("fast", "MART + FAST", "mart", baseline="mart", method="fast"),
    Row("bt-nr1", "MART + BT, N_R=1", "mart", ("robust=1",), baseline="mart"),
    Row("bt-nr2", "MART + BT, N_R=2", "mart", baseline="mart"),
)


def _augmix(n: str) -> tuple[Row, ...]:
    """Return the rows of the AugMix table for CIFAR-``n``, and one of our own."""
    family, base, data = f"augmix{n}", f"augmix-{n}", f"CIFAR-{n}"
    no_jsd = ("jsd=false", "robust=1", "outlier=1")
    return _from_paper(
        Row(base, f"AugMix, {data}", family),
        Row(f"no-jsd-{n}", f"AugMix − JSD, {data}", family, no_jsd, base),
        Row(f"bt-{n}", f"AugMix + BT, {data}", family, baseline=base),
        Row(f"bt-views-{n}", f"AugMix + BT, images as views, {data}", family, ("data.views=true",), base),
    )


AUGMIX_ROWS = (*_augmix("10"), *_augmix("100"))


def _fewer(steps: int) -> tuple[str, ...]:
    """Return settings for N_B = ``steps``. Step size and γ are ours, since the paper does not give them."""
    return f"boundary={steps}", "gamma=0.75", "scale=1.7"


FAST_ROWS = _from_paper(
    TRADES,
    *(Row(f"fast-{n}", f"TRADES + FAST, N={n}", "trades", baseline="trades", method=f"fast-{n}") for n in range(2, 6)),
    *(Row(f"bt-nb{n}", f"TRADES + BT, N_B={n}", "trades", _fewer(n), "trades") for n in range(3, 7)),
)


# ------------------------------------------------------------------------------------------- figures


def panel_rows(scale: Scale, zero: str, family: str = "mnist") -> tuple[Row, ...]:
    """Return the rows of the MNIST study in which ``zero``, one of "N_B", "N_O" and "N_R", is 0."""
    first, second = (role for role in ROLES if role != zero)
    return tuple(_oracle_row({zero: 0, first: a, second: b}, family) for a in scale.grid for b in scale.grid)


def _oracle_row(steps: dict[str, int], family: str = "mnist") -> Row:
    name = "-".join(f"{role[-1].lower()}{steps[role]}" for role in ROLES)
    settings = tuple(f"{setting}={steps[role]}" for role, setting in ROLES.items())
    title = ", ".join(f"{role}={steps[role]}" for role in ROLES)
    return Row(name, title, family, (*settings, "ordered=false"), baseline="baseline")


def oracle_rows(scale: Scale, family: str = "mnist") -> tuple[Row, ...]:
    """Return the rows of the MNIST study from one of its starts: its baseline, and the points of three grids."""
    base = Row("baseline", "PGD-AT, seven steps for all", family)
    grids = {row.name: row for zero in ROLES for row in panel_rows(scale, zero, family)}
    return _from_paper(base, *grids.values())


def looked_at(scale: Scale) -> tuple[Row, ...]:
    """Return the runs whose shares and scores are drawn: TRADES, and MNIST with the oracle."""
    most = max(scale.grid)
    oracle = _oracle_row({"N_B": most, "N_O": 0, "N_R": most})
    return TRADES_NR2, replace(oracle, name="mnist-oracle", title="PGD-AT, categories by oracle")


def sweep(name: str, setting: str, symbol: str, values: Sequence[float]) -> tuple[Row, ...]:
    """Return TRADES, and BulletTrain at several values of a setting."""
    texts = [f"{value:g}" for value in values]
    rows = (Row(f"{name}-{v}", f"TRADES + BT, {symbol}={v}", "trades", (f"{setting}={v}",), "trades") for v in texts)
    return TRADES, *rows


# ------------------------------------------------------------------------------- other scores and methods

SCORES = {"svar": "SVar", "cross-entropy": "cross-entropy", "margin": "margin", "gradient-norm": "gradient norm"}
SCORE_ROWS = (
    TRADES,
    *(Row(name, f"TRADES + BT by {title}", "trades", (f"score={name}",), "trades") for name, title in SCORES.items()),
    Row("random", "TRADES + BT by chance", "trades", ("score=random",), baseline="trades"),
)
PLANE_ROWS = (
    Row("trades", "TRADES", "trades"),
    Row("bt-nr2", "TRADES + BT", "trades", baseline="trades"),
    Row("bt-nr0", "TRADES + BT, N_R=0", "trades", ("robust=0",), baseline="trades"),
    Row("mart", "MART", "mart"),
    Row("mart-bt", "MART + BT", "mart", baseline="mart"),
    Row("pgd-at", "PGD-AT", "trades", PGD_AT),
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


LARGE_ROWS = _from_paper(
    Row("trades", "TRADES, 10 steps for all", "trades", paper=BESIDE_ROBUSTBENCH),
    Row("fast-3", "TRADES, 3 steps for all", "trades", baseline="trades", method="fast-3"),
    Row("bt-nr2", "TRADES + BulletTrain 10/2", "trades", baseline="trades"),
    Row("random", "TRADES + BulletTrain 10/2 by chance", "trades", ("score=random",), baseline="trades"),
    Row("bt-nb5", "TRADES + BulletTrain 5/2, γ=0.75", "trades", _fewer(5), baseline="trades"),
    Row("bt-nr0", "TRADES + BulletTrain 10/0", "trades", ("robust=0",), baseline="trades"),
    Row("fast", "TRADES + FAST", "trades", baseline="trades", method="fast"),
    Row("pgd-at", "PGD-AT, 10 steps for all", "trades", PGD_AT),
    Row("pgd-at-3", "PGD-AT, 3 steps for all", "trades", PGD_AT, baseline="pgd-at", method="fast-3"),
    Row("pgd-at-bt", "PGD-AT + BulletTrain 10/2", "trades", PGD_AT, baseline="pgd-at"),
    Row("mart", "MART, 10 steps for all", "mart"),
    Row("mart-bt", "MART + BulletTrain 10/2", "mart", baseline="mart", paper=PAPER["mart"]["bt-nr2"]),
)


def large_rows(scale: Scale) -> tuple[Row, ...]:
    """Return the rows of WRN-34-10 in the order of training. The first two get all attacks on all test images."""
    names = "trades bt-nr2 fast-3 random bt-nb5 pgd-at pgd-at-3 pgd-at-bt"
    if scale.name == "paper":
        names = "bt-nr2 bt-nb5 trades fast-3 random mart mart-bt bt-nr0 fast"
    rows = {row.name: row for row in LARGE_ROWS}
    first, second, *others = (rows[name] for name in names.split())
    whole = (replace(row, attacks=("apgd", "autoattack", "pgd100x10")) for row in (first, second))
    return *whole, *(replace(row, attacks=("apgd",), images=2000) for row in others)
