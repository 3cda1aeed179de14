"""Rows and claims of the paper's tables: WRN-34-10 (AugMix: WRN-40-2) on CIFAR-10, PGD-20."""

from __future__ import annotations

from bullettrain.reproduction.scales import Scale
from bullettrain.reproduction.study import SHARES, Check, Claim, Row


def _paper(clean: float, robust: float, theory: float | None, wall: float | None, *shares: float) -> dict[str, float]:
    figures = {"clean": clean, "pgd20": robust, **dict(zip(SHARES, shares, strict=False))}
    return figures | {key: value for key, value in (("theoretical", theory), ("wall", wall)) if value is not None}


def gain(row: str, metric: str, offset: float, against: str) -> Check:
    """The row is better than ``against`` by ``offset``, or worse by no more where that is negative."""
    return Check((row,), metric, "≥", offset, against)


def _speed(row: str, theory: float, wall: float) -> tuple[Check, ...]:
    return Check((row,), "theoretical", "≥", theory), Check((row,), "wall", "≥", wall)


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


def trades(scale: Scale) -> tuple[Row, ...]:
    """The seven rows of the TRADES table."""
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


def trades_claims(scale: Scale) -> tuple[Claim, ...]:
    """What the paper says of them."""
    return (
        Claim(
            "With N_R = 2, robust accuracy is 0.3 points below TRADES at most",
            (gain("bt-nr2", "pgd20", -0.26, "trades"),),
        ),
        Claim("… and clean accuracy is 1.0 point above", (gain("bt-nr2", "clean", 0.97, "trades"),)),
        Claim("… 2.3 times less computation, 2.2 times less time", _speed("bt-nr2", 2.3, 2.2)),
        Claim(
            "With N_R = 0, robust accuracy is 4.5 points below TRADES at most, clean accuracy 2.6 above",
            (gain("bt-nr0", "pgd20", -4.51, "trades"), gain("bt-nr0", "clean", 2.58, "trades")),
        ),
        Claim(
            "… which is no worse than TRADES with λ = 1: more robust, and at most 1.1 points less clean accuracy",
            (gain("bt-nr0", "pgd20", 0, "trades-1"), gain("bt-nr0", "clean", -1.14, "trades-1")),
        ),
        Claim("… 3.0 times less computation, 2.7 times less time", _speed("bt-nr0", 3.0, 2.7)),
        Claim("FAST fails against PGD-20 (4.5 % left)", (Check(("fast",), "pgd20", "≤", 10),)),
        Claim("YOPO-2-5 is 10 points less robust than TRADES", (Check(("yopo",), "pgd20", "≤", -10.01, "trades"),)),
    )


def mart(scale: Scale) -> tuple[Row, ...]:
    """The four rows of the MART table."""
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


def mart_claims(scale: Scale) -> tuple[Claim, ...]:
    """What the paper says of them."""
    return (
        Claim("With N_R = 2, robust accuracy is 1.3 points above MART", (gain("bt-nr2", "pgd20", 1.35, "mart"),)),
        Claim("… and clean accuracy 2.4 above", (gain("bt-nr2", "clean", 2.43, "mart"),)),
        Claim("… 2.2 times less computation, 1.9 times less time", _speed("bt-nr2", 2.2, 1.9)),
        Claim(
            "With N_R = 1, robust accuracy is 0.7 points above MART, clean accuracy 2.9",
            (gain("bt-nr1", "pgd20", 0.72, "mart"), gain("bt-nr1", "clean", 2.95, "mart")),
        ),
        Claim("… 2.5 times less computation, 2.1 times less time", _speed("bt-nr1", 2.5, 2.1)),
        Claim("FAST fails against PGD-20 (0.2 % left)", (Check(("fast",), "pgd20", "≤", 10),)),
        Claim(
            "Under AutoAttack, which the paper did not run, robust accuracy is above MART's, too",
            (gain("bt-nr2", "autoattack", 0, "mart"),),
        ),
    )


AUGMIX = {"10": (88.8, 86.9, 88.8, 35, 1.82 / 1.08), "100": (64.0, 60.2, 63.6, 36, 1.84 / 1.10)}
"""Corruption accuracy of AugMix, without JSD, with BulletTrain; F_B; wall-clock."""


def augmix(scale: Scale) -> tuple[Row, ...]:
    """The six cells of the AugMix table, a row each, and two of ours."""
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
            Row(
                f"bt-views-{part}",
                f"AugMix + BT, images as views, {on}",
                family,
                ("data.views=true",),
                baseline=plain,
            ),
        ]
    return tuple(rows)


def augmix_claims(scale: Scale) -> tuple[Claim, ...]:
    """What the paper says of them."""
    return (
        Claim("On CIFAR-10-C, accuracy is AugMix's", (gain("bt-10", "corruptions", 0, "augmix-10"),)),
        Claim("On CIFAR-100-C, it is 0.4 points below at most", (gain("bt-100", "corruptions", -0.4, "augmix-100"),)),
        Claim(
            "It is 1.9 and 3.4 points above AugMix without JSD",
            (
                gain("bt-10", "corruptions", 1.9, "no-jsd-10"),
                gain("bt-100", "corruptions", 3.4, "no-jsd-100"),
            ),
        ),
        Claim(
            "Views are made for no more than 35 and 36 % of the examples",
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


def fast(scale: Scale) -> tuple[Row, ...]:
    """Multi-step FAST, N = 2 to 5, and BulletTrain, N_B = 3 to 6."""
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
            (f"boundary={n}", "gamma=0.75", "scale=1.7"),  # a step as multi-step FAST has it: the paper gives neither
            baseline="trades",
            paper=_paper(*figures),
        )
        for n, figures in MINED.items()
    )
    return (TRADES, *steps, *mined)


def fast_claims(scale: Scale) -> tuple[Claim, ...]:
    """What the paper says of them."""
    pairs = [(f"bt-nb{n + 1}", f"fast-{n}") for n in MULTI_STEP]
    return (
        Claim(
            "For N_B = 3 to 6, robust accuracy stays within 0.9 points of TRADES",
            tuple(gain(mined, "pgd20", -0.84, "trades") for mined, _ in pairs),
        ),
        Claim(
            "… and is above that of multi-step FAST at the same place of the table",
            tuple(gain(mined, "pgd20", 0, fast) for mined, fast in pairs),
        ),
        Claim("… as is clean accuracy", tuple(gain(mined, "clean", 0, fast) for mined, fast in pairs)),
        Claim("… and the theoretical speed-up", tuple(gain(mined, "theoretical", 0, fast) for mined, fast in pairs)),
        Claim(
            "At 3 times less computation, N_B = 5 beside N = 3, it is 1.4 points cleaner and 2.2 more robust",
            (gain("bt-nb5", "clean", 1.4, "fast-3"), gain("bt-nb5", "pgd20", 2.2, "fast-3")),
        ),
        Claim(
            "Its wall-clock speed-up is like multi-step FAST's where the theoretical ones are close (to 0.1)",
            (gain("bt-nb3", "wall", -0.1, "fast-2"), gain("bt-nb6", "wall", -0.1, "fast-3")),
        ),
    )
