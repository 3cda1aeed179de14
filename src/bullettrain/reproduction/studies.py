"""What can be reproduced. The paper's figures are of WRN-34-10 (AugMix: WRN-40-2) on CIFAR-10, PGD-20."""

from __future__ import annotations

from bullettrain.reproduction.scales import Scale
from bullettrain.reproduction.study import Check, Claim, Row, Study
from bullettrain.training.settings import ConfigError

SHARES = ("boundary", "robust", "outlier")


def _paper(clean: float, robust: float, theory: float | None, wall: float | None, *shares: float) -> dict[str, float]:
    figures = {"clean": clean, "pgd20": robust, **dict(zip(SHARES, shares, strict=False))}
    return figures | {key: value for key, value in (("theoretical", theory), ("wall", wall)) if value is not None}


def _gain(row: str, metric: str, offset: float, against: str) -> Check:
    return Check((row,), metric, "≥", offset, against)


def _speed(row: str, theory: float, wall: float) -> tuple[Check, ...]:
    return Check((row,), "theoretical", "≥", theory), Check((row,), "wall", "≥", wall)


# --------------------------------------------------------------------------------------------- tables

TRADES = Row("trades", "TRADES λ=1/6", "trades", plain=True, paper=_paper(84.92, 56.61, 1, 1))
TRADES_NR0 = Row(
    "bt-nr0",
    "TRADES λ=1/6 + BT, N_R=0",
    "trades",
    ("robust=0",),
    baseline="trades",
    paper=_paper(87.50, 52.10, 3.0, 2.7, 26, 55, 18),
)
TRADES_NR2 = Row(
    "bt-nr2",
    "TRADES λ=1/6 + BT, N_R=2",
    "trades",
    baseline="trades",
    paper=_paper(85.89, 56.35, 2.3, 2.2, 28, 54, 18),
)


def _trades(scale: Scale) -> tuple[Row, ...]:
    weak = ("beta=1",)
    return (
        Row("trades-1", "TRADES λ=1", "trades", weak, plain=True, paper=_paper(88.64, 49.14, 1, 1)),
        TRADES,
        Row(
            "fast",
            "TRADES λ=1/6 + FAST",
            "trades",
            baseline="trades",
            paper=_paper(93.94, 4.48, 5.5, 3.7),
            method="fast",
        ),
        Row(
            "yopo-1",
            "TRADES λ=1 + YOPO-2-5",
            "trades",
            weak,
            baseline="trades-1",
            paper=_paper(88.47, 45.28, None, 3.1),
            method="yopo-2-5",
        ),
        Row(
            "yopo",
            "TRADES λ=1/6 + YOPO-2-5",
            "trades",
            baseline="trades",
            paper=_paper(89.95, 46.60, None, 3.1),
            method="yopo-2-5",
        ),
        TRADES_NR0,
        TRADES_NR2,
    )


def _trades_claims(scale: Scale) -> tuple[Claim, ...]:
    return (
        Claim(
            "With N_R = 2, robust accuracy is 0.3 points below TRADES at most",
            (_gain("bt-nr2", "pgd20", -0.26, "trades"),),
        ),
        Claim("… and clean accuracy is 1.0 point above", (_gain("bt-nr2", "clean", 0.97, "trades"),)),
        Claim("… 2.3 times less computation, 2.2 times less time", _speed("bt-nr2", 2.3, 2.2)),
        Claim(
            "With N_R = 0, robust accuracy is 4.5 points below TRADES at most, clean accuracy 2.6 above",
            (_gain("bt-nr0", "pgd20", -4.51, "trades"), _gain("bt-nr0", "clean", 2.58, "trades")),
        ),
        Claim(
            "… which is no worse than TRADES with λ = 1: more robust, and at most 1.1 points less clean accuracy",
            (_gain("bt-nr0", "pgd20", 0, "trades-1"), _gain("bt-nr0", "clean", -1.14, "trades-1")),
        ),
        Claim("… 3.0 times less computation, 2.7 times less time", _speed("bt-nr0", 3.0, 2.7)),
        Claim("FAST fails against PGD-20 (4.5 % left)", (Check(("fast",), "pgd20", "≤", 10),)),
        Claim("YOPO-2-5 is 10 points less robust than TRADES", (Check(("yopo",), "pgd20", "≤", -10.01, "trades"),)),
    )


def _mart(scale: Scale) -> tuple[Row, ...]:
    return (
        Row("mart", "MART", "mart", plain=True, paper=_paper(84.17, 57.39, 1, 1)),
        Row(
            "fast",
            "MART + FAST",
            "mart",
            baseline="mart",
            paper=_paper(93.95, 0.20, 5.5, 4.0),
            method="fast",
        ),
        Row(
            "bt-nr1",
            "MART + BT, N_R=1",
            "mart",
            ("robust=1",),
            baseline="mart",
            paper=_paper(87.12, 58.11, 2.5, 2.1, 29, 44, 27),
        ),
        Row("bt-nr2", "MART + BT, N_R=2", "mart", baseline="mart", paper=_paper(86.60, 58.74, 2.2, 1.9, 30, 43, 26)),
    )


def _mart_claims(scale: Scale) -> tuple[Claim, ...]:
    return (
        Claim("With N_R = 2, robust accuracy is 1.3 points above MART", (_gain("bt-nr2", "pgd20", 1.35, "mart"),)),
        Claim("… and clean accuracy 2.4 above", (_gain("bt-nr2", "clean", 2.43, "mart"),)),
        Claim("… 2.2 times less computation, 1.9 times less time", _speed("bt-nr2", 2.2, 1.9)),
        Claim(
            "With N_R = 1, robust accuracy is 0.7 points above MART, clean accuracy 2.9",
            (_gain("bt-nr1", "pgd20", 0.72, "mart"), _gain("bt-nr1", "clean", 2.95, "mart")),
        ),
        Claim("… 2.5 times less computation, 2.1 times less time", _speed("bt-nr1", 2.5, 2.1)),
        Claim("FAST fails against PGD-20 (0.2 % left)", (Check(("fast",), "pgd20", "≤", 10),)),
    )


AUGMIX = {"10": (88.8, 86.9, 88.8, 35, 1.82 / 1.08), "100": (64.0, 60.2, 63.6, 36, 1.84 / 1.10)}
"""Corruption accuracy of AugMix, without JSD, with BulletTrain; F_B; wall-clock."""


def _augmix(scale: Scale) -> tuple[Row, ...]:
    rows: list[Row] = []
    for part, (full, no_jsd, mined, boundary, wall) in AUGMIX.items():
        family, plain, on = f"augmix{part}", f"augmix-{part}", f"CIFAR-{part}"
        rows += [
            Row(plain, f"AugMix, {on}", family, plain=True, paper={"corruptions": full, "theoretical": 1, "wall": 1}),
            Row(
                f"no-jsd-{part}",
                f"AugMix − JSD, {on}",
                family,
                ("jsd=false", "robust=1", "outlier=1"),
                baseline=plain,
                paper={"corruptions": no_jsd, "theoretical": 3},
            ),
            Row(
                f"bt-{part}",
                f"AugMix + BT, {on}",
                family,
                baseline=plain,
                paper={"corruptions": mined, "boundary": boundary, "theoretical": 1.8, "wall": wall},
            ),
        ]
    return tuple(rows)


def _augmix_claims(scale: Scale) -> tuple[Claim, ...]:
    return (
        Claim("On CIFAR-10-C, accuracy is AugMix's", (_gain("bt-10", "corruptions", 0, "augmix-10"),)),
        Claim("On CIFAR-100-C, it is 0.4 points below at most", (_gain("bt-100", "corruptions", -0.4, "augmix-100"),)),
        Claim(
            "It is 1.9 and 3.4 points above AugMix without JSD",
            (
                _gain("bt-10", "corruptions", 1.9, "no-jsd-10"),
                _gain("bt-100", "corruptions", 3.4, "no-jsd-100"),
            ),
        ),
        Claim(
            "About a third of the examples get views",
            (Check(("bt-10",), "boundary", "≤", 35), Check(("bt-100",), "boundary", "≤", 36)),
        ),
        Claim(
            "1.8 times less computation, 1.7 times less time",
            (*_speed("bt-10", 1.8, 1.69), *_speed("bt-100", 1.8, 1.67)),
        ),
    )


MULTI_STEP = {
    2: (85.43, 50.56, 3.7, 3.0),
    3: (84.47, 53.52, 2.8, 2.5),
    4: (84.23, 53.95, 2.2, 2.2),
    5: (84.12, 54.45, 1.8, 1.8),
}
MINED = {
    3: (86.66, 55.93, 3.7, 3.0),
    4: (86.17, 55.77, 3.3, 2.8),
    5: (85.89, 56.17, 3.0, 2.7),
    6: (86.28, 56.0, 2.8, 2.6),
}


def _fast(scale: Scale) -> tuple[Row, ...]:
    steps = tuple(
        Row(
            f"fast-{n}",
            f"TRADES + FAST, N={n}",
            "trades",
            baseline="trades",
            paper=_paper(*figures),
            method=f"fast-{n}",
        )
        for n, figures in MULTI_STEP.items()
    )
    mined = tuple(
        Row(
            f"bt-nb{n}",
            f"TRADES + BT, N_B={n}",
            "trades",
            (f"boundary={n}", "gamma=0.75"),
            baseline="trades",
            paper=_paper(*figures),
        )
        for n, figures in MINED.items()
    )
    return (TRADES, *steps, *mined)


def _fast_claims(scale: Scale) -> tuple[Claim, ...]:
    pairs = [(f"bt-nb{n + 1}", f"fast-{n}") for n in MULTI_STEP]
    return (
        Claim(
            "For N_B = 3 to 6, robust accuracy stays within 0.9 points of TRADES",
            tuple(_gain(mined, "pgd20", -0.84, "trades") for mined, _ in pairs),
        ),
        Claim(
            "… and is above that of multi-step FAST at the same place of the table",
            tuple(_gain(mined, "pgd20", 0, fast) for mined, fast in pairs),
        ),
        Claim("… as is clean accuracy", tuple(_gain(mined, "clean", 0, fast) for mined, fast in pairs)),
        Claim("… and the theoretical speed-up", tuple(_gain(mined, "theoretical", 0, fast) for mined, fast in pairs)),
    )


# --------------------------------------------------------------------------------------------- figures

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
    # Three equal counts would be told from no other example by anything: nothing is separated then.
    return Row(name, title, "mnist", (*settings, "ordered=false"), baseline="baseline")


def _oracle(scale: Scale) -> tuple[Row, ...]:
    rows = {row.name: row for zero in ROLES for row in panel_rows(scale, zero)}
    return (ORACLE_BASE, *rows.values())


def _oracle_claims(scale: Scale) -> tuple[Claim, ...]:
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


def _looked_at(scale: Scale) -> tuple[Row, ...]:
    """The runs whose shares and scores are drawn: TRADES as it is used, and the MNIST study's, by the oracle."""
    top = max(scale.grid)
    oracle = _oracle_row({"N_B": top, "N_O": 0, "N_R": top})
    return TRADES_NR2, Row("mnist-oracle", "PGD-AT, classes by oracle", "mnist", oracle.settings)


def _shares_claims(scale: Scale) -> tuple[Claim, ...]:
    rows = [row.name for row in _looked_at(scale)]
    return (
        Claim("The share of robust examples grows", tuple(Check((row,), "robust_rise", "≥", 0) for row in rows)),
        Claim("The share of outliers falls", tuple(Check((row,), "outlier_fall", "≥", 0) for row in rows)),
        Claim(
            "On MNIST, boundary examples are the smallest class at the end",
            (Check(("mnist-oracle",), "boundary_least", "≥", 0),),
        ),
    )


def _svar_claims(scale: Scale) -> tuple[Claim, ...]:
    rows = [row.name for row in _looked_at(scale)]
    text = "The mean SVar of outliers is below that of boundary examples, and that below robust ones', mostly"
    return (Claim(text, tuple(Check((row,), "svar_order", "≥", 95) for row in rows)),)


def _gamma(scale: Scale) -> tuple[Row, ...]:
    points = tuple(
        Row(f"gamma-{g:g}", f"TRADES + BT, γ={g:g}", "trades", (f"gamma={g:g}",), baseline="trades")
        for g in scale.gammas
    )
    return (TRADES, *points)


def _gamma_claims(scale: Scale) -> tuple[Claim, ...]:
    others = [f"gamma-{g:g}" for g in scale.gammas if g != 0.8]
    return tuple(
        Claim(
            f"{what} accuracy is not sensitive to γ (within a point of that at γ = 0.8)",
            tuple(Check((row,), metric, "≈", 1.0, "gamma-0.8") for row in others),
        )
        for what, metric in (("Clean", "clean"), ("Robust", "pgd20"))
    )


def _nr(scale: Scale) -> tuple[Row, ...]:
    points = tuple(
        Row(f"nr-{n}", f"TRADES + BT, N_R={n}", "trades", (f"robust={n}",), baseline="trades")
        for n in scale.robust_steps
    )
    return (TRADES, *points)


def _nr_claims(scale: Scale) -> tuple[Claim, ...]:
    low, high = f"nr-{min(scale.robust_steps)}", f"nr-{max(scale.robust_steps)}"
    return (
        Claim(
            "A smaller N_R raises clean accuracy and the speed-up",
            (_gain(low, "clean", 0, high), _gain(low, "theoretical", 0, high)),
        ),
        Claim("… and lowers robust accuracy", (_gain(high, "pgd20", 0, low),)),
        Claim(
            "… but not by much: even N_R = 0 is within 4.5 points of TRADES", (_gain(low, "pgd20", -4.51, "trades"),)
        ),
    )


def _strong(scale: Scale) -> tuple[Row, ...]:
    def beside(row: Row, **paper: float) -> Row:
        return Row(row.name, row.title, row.family, row.settings, row.plain, row.baseline, {**row.paper, **paper})

    return (
        beside(TRADES, pgd100x10=54.33, pgd1000x5=54.49, autoattack=53.08),
        beside(TRADES_NR2, pgd100x10=54.32, pgd1000x5=54.41),
    )


def _strong_claims(scale: Scale) -> tuple[Claim, ...]:
    return (
        Claim("Under PGD-100 with 10 restarts, both are equal", (_gain("bt-nr2", "pgd100x10", -0.01, "trades"),)),
        Claim("Under PGD-1000 with 5 restarts, 0.1 points apart", (_gain("bt-nr2", "pgd1000x5", -0.08, "trades"),)),
        Claim(
            "Under AutoAttack, which the paper did not run, 0.3 points apart at most",
            (_gain("bt-nr2", "autoattack", -0.26, "trades"),),
        ),
    )


SCORES = {"cross-entropy": "cross-entropy", "margin": "margin", "gradient-norm": "gradient norm", "random": "chance"}


def _uncertainty(scale: Scale) -> tuple[Row, ...]:
    others = tuple(
        Row(name, f"TRADES + BT by {title}", "trades", (f"score={name}",), baseline="trades")
        for name, title in SCORES.items()
    )
    return (TRADES, Row("svar", "TRADES + BT by SVar", "trades", baseline="trades"), *others)


def _uncertainty_claims(scale: Scale) -> tuple[Claim, ...]:
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


def _plane(scale: Scale) -> tuple[Row, ...]:
    pgd_at = ("objective=pgd-at", "beta=null")
    return (
        Row("trades", "TRADES", "trades", plain=True),
        Row("bt-nr2", "TRADES + BT", "trades", baseline="trades"),
        Row("bt-nr0", "TRADES + BT, N_R=0", "trades", ("robust=0",), baseline="trades"),
        Row("mart", "MART", "mart", plain=True),
        Row("mart-bt", "MART + BT", "mart", baseline="mart"),
        Row("pgd-at", "PGD-AT", "trades", pgd_at, plain=True),
        Row("pgd-at-bt", "PGD-AT + BT", "trades", pgd_at, baseline="pgd-at"),
        Row("fast", "FAST", "trades", pgd_at, baseline="pgd-at", method="fast"),
        Row("fast-3", "FAST, N=3", "trades", pgd_at, baseline="pgd-at", method="fast-3"),
        Row("n-fgsm", "N-FGSM", "trades", pgd_at, baseline="pgd-at", method="n-fgsm"),
        Row("free", "Free", "trades", pgd_at, baseline="pgd-at", method="free-8"),
        Row("grad-align", "GradAlign", "trades", pgd_at, baseline="pgd-at", method="grad-align"),
        Row("trades-fast", "TRADES + FAST", "trades", baseline="trades", method="fast"),
        Row("yopo", "TRADES + YOPO-2-5", "trades", baseline="trades", method="yopo-2-5"),
    )


ROBUST = ("clean", "pgd20", "autoattack")
STUDIES = {
    study.name: study
    for study in (
        Study("table-trades", "TRADES with and without BulletTrain", _trades, ROBUST, _trades_claims),
        Study("table-mart", "MART with and without BulletTrain", _mart, ROBUST, _mart_claims),
        Study(
            "table-augmix",
            "AugMix with and without BulletTrain",
            _augmix,
            ("clean", "corruptions"),
            _augmix_claims,
            columns=("corruptions", "clean", "boundary", "theoretical", "work", "wall"),
        ),
        Study(
            "table-fast", "Fewer steps for all, or for some: multi-step FAST", _fast, ("clean", "pgd20"), _fast_claims
        ),
        Study(
            "fig-oracle",
            "Which examples need steps (MNIST, true classes)",
            _oracle,
            ("clean", "pgd100x20"),
            _oracle_claims,
            columns=("clean", "pgd100x20"),
            figure="oracle",
        ),
        Study(
            "fig-shares",
            "Shares of the classes over training",
            _looked_at,
            ("clean",),
            _shares_claims,
            columns=("robust_rise", "outlier_fall", "boundary_least"),
            figure="shares",
            about="First to last record of training, in points; the last column is how much smaller the share of "
            "boundary examples is than the next one, at the end.",
        ),
        Study(
            "fig-svar",
            "SVar of the classes over training",
            _looked_at,
            ("clean",),
            _svar_claims,
            columns=("svar_order",),
            figure="svar",
            about="The share of training records in which the three means are in order.",
        ),
        Study(
            "fig-allocation",
            "One mini-batch by SVar, and the steps it is given",
            lambda scale: (TRADES_NR2,),
            ("clean",),
            columns=("boundary", "robust", "outlier"),
            figure="allocation",
        ),
        Study("fig-gamma", "Accuracy and speed-up over γ", _gamma, ("clean", "pgd20"), _gamma_claims, figure="gamma"),
        Study("fig-nr", "Accuracy and speed-up over N_R", _nr, ("clean", "pgd20"), _nr_claims, figure="robust_steps"),
        Study(
            "strong-attacks",
            "Stronger attacks than those of the tables",
            _strong,
            ("clean", "pgd20", "pgd100x10", "pgd1000x5", "autoattack"),
            _strong_claims,
            columns=("clean", "pgd20", "pgd100x10", "pgd1000x5", "autoattack"),
            about="The figure beside AutoAttack is RobustBench's, of the TRADES authors' network.",
        ),
        Study(
            "uncertainty",
            "Other scores in the place of SVar",
            _uncertainty,
            ("clean", "pgd20"),
            _uncertainty_claims,
            columns=("clean", "pgd20", "rank", "rank_correct", "theoretical"),
            figure="ranks",
            ranks=True,
            about="Rank correlation of the score with the classes that ten PGD steps find, over all training "
            "examples looked at, and over the correctly classified ones alone, where the sign does not help.",
        ),
        Study(
            "plane",
            "Accuracy under AutoAttack over training time: what a user chooses from",
            _plane,
            ROBUST,
            columns=("clean", "pgd20", "autoattack", "minutes", "work"),
            figure="plane",
            about="Not of the paper. Minutes count where a run had the device to itself.",
        ),
    )
}


def find_study(name: str) -> Study:
    """The study called ``name``; ConfigError with what there is otherwise."""
    if name not in STUDIES:
        raise ConfigError(f"there is nothing called {name!r} to reproduce; there are {', '.join(STUDIES)}")
    return STUDIES[name]
