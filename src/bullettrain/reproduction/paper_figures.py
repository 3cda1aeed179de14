"""Rows and claims of the paper's figures, of the statements in its text, and of the plane of all methods."""

from __future__ import annotations

from bullettrain.reproduction.paper_tables import TRADES, TRADES_NR2, gain
from bullettrain.reproduction.scales import Scale
from bullettrain.reproduction.study import Check, Claim, Row

ROLES = {"N_B": "boundary", "N_O": "outlier", "N_R": "robust"}
ORACLE_BASE = Row(
    "baseline", "PGD-AT, seven steps for all", "mnist", plain=True, paper={"pgd100x20": 90.6, "theoretical": 1}
)


def panel_rows(scale: Scale, zero: str) -> tuple[Row, ...]:
    """The rows of the MNIST study in which ``zero`` of "N_B", "N_O", "N_R" is 0, first of the others slowest."""
    first, second = (role for role in ROLES if role != zero)
    return tuple(_oracle_row({zero: 0, first: a, second: b}) for a in scale.grid for b in scale.grid)


def _oracle_row(steps: dict[str, int]) -> Row:
    name = "-".join(f"{role[-1].lower()}{steps[role]}" for role in ROLES)
    title = ", ".join(f"{role}={steps[role]}" for role in ROLES)
    settings = tuple(f"{ROLES[role]}={steps[role]}" for role in ROLES)
    return Row(name, title, "mnist", (*settings, "ordered=false"), baseline="baseline")


def oracle(scale: Scale) -> tuple[Row, ...]:
    """The MNIST study: its baseline, and every point of three grids, each once."""
    rows = {row.name: row for zero in ROLES for row in panel_rows(scale, zero)}
    return (ORACLE_BASE, *rows.values())


def oracle_claims(scale: Scale) -> tuple[Claim, ...]:
    """What the paper says of it."""
    names = {zero: tuple(row.name for row in panel_rows(scale, zero)) for zero in ROLES}
    return (
        Claim(
            "Without steps for boundary examples, robust accuracy is under 40 %",
            (Check(names["N_B"], "pgd100x20", "≤", 40),),
        ),
        Claim(
            "Without steps for outliers, the best is 1.0 point above the baseline",
            (Check(names["N_O"], "pgd100x20", "≥", 1.0, "baseline"),),
        ),
        Claim(
            "Without steps for robust examples, the best is 1.4 points below it at most",
            (Check(names["N_R"], "pgd100x20", "≥", -1.4, "baseline"),),
        ),
    )


def looked_at(scale: Scale) -> tuple[Row, ...]:
    """The runs whose shares and scores are drawn: TRADES as it is used, and the MNIST study's, by the oracle."""
    top = max(scale.grid)
    oracle = _oracle_row({"N_B": top, "N_O": 0, "N_R": top})
    return TRADES_NR2, Row("mnist-oracle", "PGD-AT, classes by oracle", "mnist", oracle.settings)


def shares_claims(scale: Scale) -> tuple[Claim, ...]:
    """What the paper says of the shares."""
    rows = [row.name for row in looked_at(scale)]
    return (
        Claim("The share of robust examples grows", tuple(Check((row,), "robust_rise", "≥", 0) for row in rows)),
        Claim("The share of outliers falls", tuple(Check((row,), "outlier_fall", "≥", 0) for row in rows)),
        Claim(
            "On MNIST, boundary examples are the smallest class at the end",
            (Check(("mnist-oracle",), "boundary_least", "≥", 0),),
        ),
    )


def svar_claims(scale: Scale) -> tuple[Claim, ...]:
    """What the paper says of the scores."""
    rows = [row.name for row in looked_at(scale)]
    text = "The mean SVar of outliers is below that of boundary examples, and that below robust ones', mostly"
    return (Claim(text, tuple(Check((row,), "svar_order", "≥", 95) for row in rows)),)


def gamma(scale: Scale) -> tuple[Row, ...]:
    """TRADES with BulletTrain over γ."""
    points = tuple(
        Row(f"gamma-{g:g}", f"TRADES + BT, γ={g:g}", "trades", (f"gamma={g:g}",), baseline="trades")
        for g in scale.gammas
    )
    return (TRADES, *points)


def gamma_claims(scale: Scale) -> tuple[Claim, ...]:
    """What the paper says of it."""
    others = [f"gamma-{g:g}" for g in scale.gammas if g != 0.8]
    return tuple(
        Claim(
            f"{what} accuracy is not sensitive to γ (within a point of that at γ = 0.8)",
            tuple(Check((row,), metric, "≈", 1.0, "gamma-0.8") for row in others),
        )
        for what, metric in (("Clean", "clean"), ("Robust", "pgd20"))
    )


def nr(scale: Scale) -> tuple[Row, ...]:
    """TRADES with BulletTrain over N_R."""
    points = tuple(
        Row(f"nr-{n}", f"TRADES + BT, N_R={n}", "trades", (f"robust={n}",), baseline="trades")
        for n in scale.robust_steps
    )
    return (TRADES, *points)


def nr_claims(scale: Scale) -> tuple[Claim, ...]:
    """What the paper says of it."""
    low, high = f"nr-{min(scale.robust_steps)}", f"nr-{max(scale.robust_steps)}"
    return (
        Claim(
            "A smaller N_R raises clean accuracy and the speed-up",
            (gain(low, "clean", 0, high), gain(low, "theoretical", 0, high)),
        ),
        Claim("… and lowers robust accuracy", (gain(high, "pgd20", 0, low),)),
        Claim("… but not by much: even N_R = 0 is within 4.5 points of TRADES", (gain(low, "pgd20", -4.51, "trades"),)),
    )


def strong(scale: Scale) -> tuple[Row, ...]:
    """TRADES with and without BulletTrain, for attacks that are stronger than PGD-20."""

    def beside(row: Row, **paper: float) -> Row:
        return Row(row.name, row.title, row.family, row.settings, row.plain, row.baseline, {**row.paper, **paper})

    return (
        beside(TRADES, pgd100x10=54.33, pgd1000x5=54.49, autoattack=53.08),
        beside(TRADES_NR2, pgd100x10=54.32, pgd1000x5=54.41),
    )


def strong_claims(scale: Scale) -> tuple[Claim, ...]:
    """What the paper says of it, and the same of AutoAttack."""
    return (
        Claim("Under PGD-100 with 10 restarts, both are equal", (gain("bt-nr2", "pgd100x10", -0.01, "trades"),)),
        Claim("Under PGD-1000 with 5 restarts, 0.1 points apart", (gain("bt-nr2", "pgd1000x5", -0.08, "trades"),)),
        Claim(
            "Under AutoAttack, which the paper did not run, 0.3 points apart at most",
            (gain("bt-nr2", "autoattack", -0.26, "trades"),),
        ),
    )


SCORES = {"cross-entropy": "cross-entropy", "margin": "margin", "gradient-norm": "gradient norm", "random": "chance"}


def uncertainty(scale: Scale) -> tuple[Row, ...]:
    """TRADES with BulletTrain by other scores, and by chance."""
    others = tuple(
        Row(name, f"TRADES + BT by {title}", "trades", (f"score={name}",), baseline="trades")
        for name, title in SCORES.items()
    )
    return (TRADES, Row("svar", "TRADES + BT by SVar", "trades", baseline="trades"), *others)


def uncertainty_claims(scale: Scale) -> tuple[Claim, ...]:
    """What the paper says of them: "comparable"."""
    real = [name for name in SCORES if name != "random"]
    return (
        Claim(
            "Other scores give comparable robust accuracy (within a point of SVar's)",
            tuple(Check((row,), "pgd20", "≈", 1.0, "svar") for row in real),
        ),
        Claim(
            "… and order examples as well as SVar does, measured by the oracle's classes",
            tuple(Check((row,), "rank", "≈", 0.05, "svar") for row in real),
        ),
        Claim("Any of them orders better than chance", (Check(("svar",), "rank", "≥", 0.1, "random"),)),
    )


def plane_claims(scale: Scale) -> tuple[Claim, ...]:
    """What the paper says of a method that its tables do not have."""
    text = "With GradAlign, FAST is not more robust (the paper does not say on which objective; here on PGD-AT)"
    return (Claim(text, (Check(("grad-align",), "pgd20", "≤", 0, "fast"),)),)


def plane(scale: Scale) -> tuple[Row, ...]:
    """All methods that a user may choose from."""
    pgd_at = ("objective=pgd-at", "beta=null")
    fewer = ("boundary=4", "gamma=0.75", "scale=1.7")  # as in the table of multi-step FAST
    return (
        Row("trades", "TRADES", "trades", plain=True),
        Row("bt-nr2", "TRADES + BT", "trades", baseline="trades"),
        Row("bt-nr0", "TRADES + BT, N_R=0", "trades", ("robust=0",), baseline="trades"),
        Row("mart", "MART", "mart", plain=True),
        Row("mart-bt", "MART + BT", "mart", baseline="mart"),
        Row("pgd-at", "PGD-AT", "trades", pgd_at, plain=True),
        Row("pgd-at-bt", "PGD-AT + BT", "trades", pgd_at, baseline="pgd-at"),
        Row("pgd-at-bt-nb4", "PGD-AT + BT, N_B=4", "trades", (*pgd_at, *fewer), baseline="pgd-at"),
        Row("fast", "FAST", "trades", pgd_at, baseline="pgd-at", method="fast"),
        Row("n-fgsm", "N-FGSM", "trades", pgd_at, baseline="pgd-at", method="n-fgsm"),
        Row("free", "Free", "trades", pgd_at, baseline="pgd-at", method="free-8"),
        Row("grad-align", "GradAlign", "trades", pgd_at, baseline="pgd-at", method="grad-align"),
        Row("trades-fast", "TRADES + FAST", "trades", baseline="trades", method="fast"),
        Row("trades-fast-3", "TRADES + FAST, N=3", "trades", baseline="trades", method="fast-3"),
        Row("yopo", "TRADES + YOPO-2-5", "trades", baseline="trades", method="yopo-2-5"),
    )
