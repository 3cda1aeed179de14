"""The rows of the paper's tables and figures: recipes with settings."""

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
    """One line of a table or point of a figure: a recipe with settings, and the paper's figures for it.

    Args:
        family: which of a scale's recipes it changes.
        settings: as `--set` takes them.
        baseline: the row that it is compared with. A row without one is a baseline: everyone gets the full number of
            steps, whatever the recipe says.
        method: what the recipe is trained by instead, as `--method` takes it: fast, fast-3, yopo-2-5.
        paper: by metric: accuracies and shares in percent, speed-ups as ratios.
        attacks: what it is evaluated by besides the study's, in the paper's names.
        images: test images for attacks that training does not end with; None: as the scale has it.
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

    @property
    def plain(self) -> bool:
        """Whether it is a baseline."""
        return self.baseline is None

    def config(self, scale: Scale, settings: Sequence[str] = ()) -> Config:
        """The run at ``scale``, with the user's own ``settings`` on top."""
        name, base = scale.recipes[self.family]
        config = recipe(name).with_settings([*base, *self.settings, *settings])
        if self.method is not None:
            return with_method(config, self.method)
        return config.baseline() if self.plain else config


def _from_paper(*rows: Row) -> tuple[Row, ...]:
    """The rows with the paper's figures for them, where it has any."""
    return tuple(replace(row, paper=row.paper or PAPER[row.family].get(row.name, {})) for row in rows)


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
    """The cells of the AugMix table for CIFAR-``n``, a row each, and one of ours."""
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
    """N_B = ``steps``, with a step size as multi-step FAST has it: the paper gives neither that nor γ."""
    return f"boundary={steps}", "gamma=0.75", "scale=1.7"


FAST_ROWS = _from_paper(
    TRADES,
    *(Row(f"fast-{n}", f"TRADES + FAST, N={n}", "trades", baseline="trades", method=f"fast-{n}") for n in range(2, 6)),
    *(Row(f"bt-nb{n}", f"TRADES + BT, N_B={n}", "trades", _fewer(n), "trades") for n in range(3, 7)),
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


def oracle_rows(scale: Scale) -> tuple[Row, ...]:
    """The MNIST study: its baseline, and every point of three grids, each once."""
    base = Row("baseline", "PGD-AT, seven steps for all", "mnist")
    grids = {row.name: row for zero in ROLES for row in panel_rows(scale, zero)}
    return _from_paper(base, *grids.values())


def looked_at(scale: Scale) -> tuple[Row, ...]:
    """The runs whose shares and scores are drawn: TRADES as it is used, and the MNIST study's, by the oracle."""
    most = max(scale.grid)
    oracle = _oracle_row({"N_B": most, "N_O": 0, "N_R": most})
    return TRADES_NR2, replace(oracle, name="mnist-oracle", title="PGD-AT, classes by oracle")


def sweep(setting: str, symbol: str, values: Sequence[float]) -> tuple[Row, ...]:
    """TRADES, and with BulletTrain at each of several values of a setting."""
    name = {"robust": "nr"}.get(setting, setting)
    rows = [
        Row(f"{name}-{v:g}", f"TRADES + BT, {symbol}={v:g}", "trades", (f"{setting}={v:g}",), baseline="trades")
        for v in values
    ]
    return TRADES, *rows


# ------------------------------------------------------------------------------- statements in its text

SCORE_ROWS = (
    TRADES,
    Row("svar", "TRADES + BT by SVar", "trades", baseline="trades"),
    Row("cross-entropy", "TRADES + BT by cross-entropy", "trades", ("score=cross-entropy",), baseline="trades"),
    Row("margin", "TRADES + BT by margin", "trades", ("score=margin",), baseline="trades"),
    Row("gradient-norm", "TRADES + BT by gradient norm", "trades", ("score=gradient-norm",), baseline="trades"),
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


def large_rows(scale: Scale) -> tuple[Row, ...]:
    """What is trained of WRN-34-10, the first first: at the paper's own scale, and at the others."""
    bullettrain = "TRADES + BulletTrain"
    rows = {
        row.name: row
        for row in _from_paper(
            Row("trades", "TRADES, 10 steps for all", "trades", paper=BESIDE_ROBUSTBENCH),
            Row("fast-3", "TRADES, 3 steps for all", "trades", baseline="trades", method="fast-3"),
            Row("bt-nr2", f"{bullettrain} 10/2", "trades", baseline="trades"),
            Row("random", f"{bullettrain} 10/2 by chance", "trades", ("score=random",), baseline="trades"),
            Row("bt-nb5", f"{bullettrain} 5/2, γ=0.75", "trades", _fewer(5), baseline="trades"),
            Row("bt-nr0", f"{bullettrain} 10/0", "trades", ("robust=0",), baseline="trades"),
            Row("fast", "TRADES + FAST", "trades", baseline="trades", method="fast"),
            Row("pgd-at", "PGD-AT, 10 steps for all", "trades", PGD_AT),
            Row("pgd-at-3", "PGD-AT, 3 steps for all", "trades", PGD_AT, baseline="pgd-at", method="fast-3"),
            Row("pgd-at-bt", "PGD-AT + BulletTrain 10/2", "trades", PGD_AT, baseline="pgd-at"),
            Row("mart", "MART, 10 steps for all", "mart"),
            Row("mart-bt", "MART + BulletTrain 10/2", "mart", baseline="mart", paper=PAPER["mart"]["bt-nr2"]),
        )
    }
    chosen = "trades bt-nr2 fast-3 random bt-nb5 pgd-at pgd-at-3 pgd-at-bt"
    if scale.name == "paper":
        chosen = "bt-nr2 bt-nb5 trades fast-3 random mart mart-bt bt-nr0 fast"
    first, second, *others = (rows[name] for name in chosen.split())
    whole = (replace(row, attacks=("pgd100x10",)) for row in (first, second))
    return *whole, *(replace(row, images=2000) for row in others)
