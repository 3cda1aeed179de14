"""Figures and claims of the paper."""

from __future__ import annotations

from bullettrain.config.recipes import RECIPES, recipe
from bullettrain.config.sections import NOT_LEARNT, Config

Figures = dict[str, float]


def _figures(
    clean: float, pgd20: float, theoretical: float | None, wall: float | None, *shares: float, **stronger: float
) -> Figures:
    names = ("clean", "pgd20", "theoretical", "wall", "boundary", "robust", "outlier")
    values = dict(zip(names, (clean, pgd20, theoretical, wall, *shares), strict=False)) | stronger
    return {name: value for name, value in values.items() if value is not None}


PAPER: dict[str, dict[str, Figures]] = {
    "trades": {
        "trades-1": _figures(88.64, 49.14, 1, 1),
        "trades": _figures(84.92, 56.61, 1, 1, pgd100x10=54.33, pgd1000x5=54.49),
        "fast": _figures(93.94, 4.48, 5.5, 3.7),
        "yopo-1": _figures(88.47, 45.28, None, 3.1),
        "yopo": _figures(89.95, 46.60, None, 3.1),
        "bt-nr0": _figures(87.50, 52.10, 3.0, 2.7, 26, 55, 18),
        "bt-nr2": _figures(85.89, 56.35, 2.3, 2.2, 28, 54, 18, pgd100x10=54.32, pgd1000x5=54.41),
        "fast-2": _figures(85.43, 50.56, 3.7, 3.0),
        "fast-3": _figures(84.47, 53.52, 2.8, 2.5),
        "fast-4": _figures(84.23, 53.95, 2.2, 2.2),
        "fast-5": _figures(84.12, 54.45, 1.8, 1.8),
        "bt-nb3": _figures(86.66, 55.93, 3.7, 3.0),
        "bt-nb4": _figures(86.17, 55.77, 3.3, 2.8),
        "bt-nb5": _figures(85.89, 56.17, 3.0, 2.7),
        "bt-nb6": _figures(86.28, 56.0, 2.8, 2.6),
    },
    "mart": {
        "mart": _figures(84.17, 57.39, 1, 1),
        "fast": _figures(93.95, 0.20, 5.5, 4.0),
        "bt-nr1": _figures(87.12, 58.11, 2.5, 2.1, 29, 44, 27),
        "bt-nr2": _figures(86.60, 58.74, 2.2, 1.9, 30, 43, 26),
    },
    "augmix10": {
        "augmix-10": {"corruptions": 88.8, "theoretical": 1, "wall": 1},
        "no-jsd-10": {"corruptions": 86.9, "theoretical": 3},
        "bt-10": {"corruptions": 88.8, "boundary": 35, "theoretical": 1.8, "wall": 1.82 / 1.08},
    },
    "augmix100": {
        "augmix-100": {"corruptions": 64.0, "theoretical": 1, "wall": 1},
        "no-jsd-100": {"corruptions": 60.2, "theoretical": 3},
        "bt-100": {"corruptions": 63.6, "boundary": 36, "theoretical": 1.8, "wall": 1.84 / 1.10},
    },
    "mnist": {"baseline": {"pgd100x20": 90.6, "theoretical": 1}},
}
"""Figures by objective and row of the paper's table: accuracies and shares of categories in percent (WRN-34-10 on
CIFAR-10; AugMix: WRN-40-2), speed-ups as ratios."""
ROBUSTBENCH_TRADES = 53.08
"""AutoAttack accuracy of the TRADES authors' network in RobustBench; not in the paper."""

_ROWS = {
    ("cifar10-trades", 10, 10, 10): PAPER["trades"]["trades"],
    ("cifar10-trades", 10, 2, 0): PAPER["trades"]["bt-nr2"],
    ("cifar10-trades", 10, 0, 0): PAPER["trades"]["bt-nr0"],
    ("cifar10-mart", 10, 10, 10): PAPER["mart"]["mart"],
    ("cifar10-mart", 10, 1, 0): PAPER["mart"]["bt-nr1"],
    ("cifar10-mart", 10, 2, 0): PAPER["mart"]["bt-nr2"],
    ("cifar10-augmix", 1, 1, 1): PAPER["augmix10"]["augmix-10"],
    ("cifar10-augmix", 1, 0, 0): PAPER["augmix10"]["bt-10"],
    ("cifar100-augmix", 1, 1, 1): PAPER["augmix100"]["augmix-100"],
    ("cifar100-augmix", 1, 0, 0): PAPER["augmix100"]["bt-100"],
    ("mnist-pgd", 7, 7, 7): PAPER["mnist"]["baseline"],
}
"""Figures by recipe and steps for boundary, robust and outlier examples."""
_HARMLESS = NOT_LEARNT | {
    *("training.precision", "training.attack_group", "data.test_size"),
    *("evaluation.steps", "evaluation.step_size", "evaluation.restarts"),
    *("method.robust", "method.outlier", "method.separation"),  # part of the keys above
}
"""Settings that may differ from the paper's recipe, since they do not change what is learnt."""


def paper_figure(config: Config | None, attack: str, eps: float | None, data: str) -> float | None:
    """Return the paper's accuracy of such a run under ``attack`` at ``eps``, as a share; None if it has none."""
    if config is None or config.recipe not in RECIPES or data != config.data.name:
        return None
    if eps is not None and (eps != config.method.eps or config.method.norm != "linf"):
        return None
    if recipe(config.recipe).differences(config).keys() - _HARMLESS:
        return None
    method = config.method
    value = _ROWS.get((config.recipe, method.boundary, method.robust, method.outlier), {}).get(attack)
    return None if value is None else value / 100


def paper_boundary(name: str) -> float | None:
    """Return the paper's share of boundary examples for the recipe ``name`` with BulletTrain; None if it has none."""
    name = name.removesuffix("-fast")
    steps = (1, 0, 0) if name.endswith("augmix") else (10, 2, 0)
    value = _ROWS.get((name, *steps), {}).get("boundary")
    return None if value is None else value / 100


# ------------------------------------------------------------------------------------------------ claims


def _oracle_claims(metric: str) -> dict[str, str]:
    return {
        "Without steps for boundary examples, robust accuracy is under 40 %": f"best(b0-*) {metric} ≤ 40",
        "Without steps for outliers, the best is 1.0 point above the baseline": f"best(*-o0-*) {metric} ≥ baseline +1",
        "Without steps for robust examples, the best is 1.4 points below it at most": (
            f"best(*-r0) {metric} ≥ baseline -1.4"
        ),
    }


_PAPERS_CLAIMS: dict[str, dict[str, str]] = {
    "table-trades": {
        "With N_R = 2, robust accuracy is 0.3 points below TRADES at most": "bt-nr2 pgd20 ≥ trades -0.26",
        "… and clean accuracy is 1.0 point above": "bt-nr2 clean ≥ trades +0.97",
        "… 2.3 times less computation, 2.2 times less time": "bt-nr2 theoretical ≥ 2.3; bt-nr2 wall ≥ 2.2",
        "With N_R = 0, robust accuracy is 4.5 points below TRADES at most, clean accuracy 2.6 above": (
            "bt-nr0 pgd20 ≥ trades -4.51; bt-nr0 clean ≥ trades +2.58"
        ),
        "… which is no worse than TRADES with λ = 1: more robust, and at most 1.1 points less clean accuracy": (
            "bt-nr0 pgd20 ≥ trades-1 0; bt-nr0 clean ≥ trades-1 -1.14"
        ),
        "… 3.0 times less computation, 2.7 times less time": "bt-nr0 theoretical ≥ 3.0; bt-nr0 wall ≥ 2.7",
        "FAST fails against PGD-20: at most 10 % survive (the paper: 4.5 %)": "fast pgd20 ≤ 10",
        "YOPO-2-5 is 10 points less robust than TRADES": "yopo pgd20 ≤ trades -10.01",
    },
    "table-mart": {
        "With N_R = 2, robust accuracy is 1.3 points above MART": "bt-nr2 pgd20 ≥ mart +1.35",
        "… and clean accuracy 2.4 above": "bt-nr2 clean ≥ mart +2.43",
        "… 2.2 times less computation, 1.9 times less time": "bt-nr2 theoretical ≥ 2.2; bt-nr2 wall ≥ 1.9",
        "With N_R = 1, robust accuracy is 0.7 points above MART, clean accuracy 2.9": (
            "bt-nr1 pgd20 ≥ mart +0.72; bt-nr1 clean ≥ mart +2.95"
        ),
        "… 2.5 times less computation, 2.1 times less time": "bt-nr1 theoretical ≥ 2.5; bt-nr1 wall ≥ 2.1",
        "FAST fails against PGD-20: at most 10 % survive (the paper: 0.2 %)": "fast pgd20 ≤ 10",
    },
    "table-augmix": {
        "On CIFAR-10-C, accuracy is AugMix's": "bt-10 corruptions ≥ augmix-10 0",
        "On CIFAR-100-C, it is 0.4 points below at most": "bt-100 corruptions ≥ augmix-100 -0.4",
        "It is 1.9 and 3.4 points above AugMix without JSD": (
            "bt-10 corruptions ≥ no-jsd-10 +1.9; bt-100 corruptions ≥ no-jsd-100 +3.4"
        ),
        "Views are made for no more than 35 and 36 % of the examples": "bt-10 boundary ≤ 35; bt-100 boundary ≤ 36",
        "1.8 times less computation, 1.7 times less time": (
            "bt-10 theoretical ≥ 1.8; bt-10 wall ≥ 1.69; bt-100 theoretical ≥ 1.8; bt-100 wall ≥ 1.67"
        ),
    },
    "table-fast": {
        "For N_B = 3 to 6, robust accuracy stays within 0.9 points of TRADES": "bt-nb* pgd20 ≥ trades -0.84",
        "… and is above that of multi-step FAST at the same place of the table": (
            "bt-nb3 pgd20 ≥ fast-2 0; bt-nb4 pgd20 ≥ fast-3 0; bt-nb5 pgd20 ≥ fast-4 0; bt-nb6 pgd20 ≥ fast-5 0"
        ),
        "… as is clean accuracy": (
            "bt-nb3 clean ≥ fast-2 0; bt-nb4 clean ≥ fast-3 0; bt-nb5 clean ≥ fast-4 0; bt-nb6 clean ≥ fast-5 0"
        ),
        "… and the theoretical speed-up": (
            "bt-nb3 theoretical ≥ fast-2 0; bt-nb4 theoretical ≥ fast-3 0; bt-nb5 theoretical ≥ fast-4 0; "
            "bt-nb6 theoretical ≥ fast-5 0"
        ),
        "At 3 times less computation, N_B = 5 beside N = 3, it is 1.4 points cleaner and 2.2 more robust": (
            "bt-nb5 clean ≥ fast-3 +1.4; bt-nb5 pgd20 ≥ fast-3 +2.2"
        ),
        "Its wall-clock speed-up is like multi-step FAST's where the theoretical ones are close (to 0.1)": (
            "bt-nb3 wall ≥ fast-2 -0.1; bt-nb6 wall ≥ fast-3 -0.1"
        ),
    },
    "fig-oracle": _oracle_claims("pgd100x20"),
    "fig-oracle-clean": _oracle_claims("pgd100x5"),
    "fig-oracle-stop": _oracle_claims("pgd100x5"),
    "fig-shares": {
        "The share of robust examples grows (by true categories: by SVar it begins at 0 by definition)": (
            "mnist-oracle robust_rise ≥ 0"
        ),
        "The share of outliers falls": "* outlier_fall ≥ 0",
        "On MNIST, boundary examples are the smallest class at the end": "mnist-oracle boundary_least ≥ 0",
    },
    "fig-svar": {
        "The mean SVar of outliers is below that of boundary examples, and that below robust ones', in at least 95 % "
        "of the records (by true categories: those by SVar are in this order by definition)": (
            "mnist-oracle svar_order ≥ 95"
        ),
    },
    "fig-gamma": {
        "Clean accuracy is not sensitive to γ (within a point of that at γ = 0.8)": "gamma-* clean ≈ gamma-0.8 1",
        "Robust accuracy is not sensitive to γ (within a point of that at γ = 0.8)": "gamma-* pgd20 ≈ gamma-0.8 1",
    },
    "fig-nr": {
        "A smaller N_R raises clean accuracy and the speed-up": "nr-0 clean ≥ nr-5 0; nr-0 theoretical ≥ nr-5 0",
        "… and lowers robust accuracy": "nr-0 pgd20 ≤ nr-5 0",
        "… but not by much: even N_R = 0 is within 4.5 points of TRADES": "nr-0 pgd20 ≥ trades -4.51",
    },
    "strong-attacks": {
        "Under PGD-100 with 10 restarts, both are equal": "bt-nr2 pgd100x10 ≥ trades -0.01",
        "Under PGD-1000 with 5 restarts, 0.1 points apart": "bt-nr2 pgd1000x5 ≥ trades -0.08",
    },
    "uncertainty": {
        "Other scores give comparable robust accuracy (within a point of SVar's)": (
            "cross-entropy pgd20 ≈ svar 1; margin pgd20 ≈ svar 1; gradient-norm pgd20 ≈ svar 1"
        ),
        "… and order examples as well as SVar does (rank correlation with the oracle's categories, within 0.05)": (
            "cross-entropy rank ≈ svar 0.05; margin rank ≈ svar 0.05; gradient-norm rank ≈ svar 0.05"
        ),
    },
    "large-network": {
        "BulletTrain is more robust than three steps for all, by 2.8 points, and 1.4 points cleaner": (
            "bt-nr2 pgd20 ≥ fast-3 +2.83; bt-nr2 clean ≥ fast-3 +1.42"
        ),
    },
    "plane": {
        "GradAlign does not make FAST more robust (the paper does not say on which objective; here on PGD-AT)": (
            "grad-align pgd20 ≤ fast 0"
        ),
    },
}
_OWN_CLAIMS: dict[str, dict[str, str]] = {
    "table-mart": {"Under AutoAttack, BulletTrain with N_R = 2 is more robust than MART": "bt-nr2 autoattack ≥ mart 0"},
    "strong-attacks": {
        "Under AutoAttack, BulletTrain with N_R = 2 is 0.3 points below TRADES at most": (
            "bt-nr2 autoattack ≥ trades -0.26"
        ),
    },
    "uncertainty": {
        "SVar orders examples better than a random score (rank correlation with the oracle's categories, by 0.1)": (
            "svar rank ≥ random +0.1"
        ),
    },
    "large-network": {
        "Under AutoAttack, BulletTrain is more robust than three steps for all": "bt-nr2 autoattack ≥ fast-3 0",
        "Under APGD, AutoAttack's first two attacks, BulletTrain is more robust than three steps for all": (
            "bt-nr2 apgd ≥ fast-3 0"
        ),
        "Examples chosen by SVar make the network a point more robust than examples chosen by a random score": (
            "bt-nr2 pgd20 ≥ random +1"
        ),
    },
}
CLAIMS = {name: claims | _OWN_CLAIMS.get(name, {}) for name, claims in _PAPERS_CLAIMS.items()}
"""By table or figure: a claim and its checks, as `row metric ≥ bound`, or `row metric ≥ other offset` for a difference
between two rows. * matches any letters: every row that matches, or the best of them."""
OWN_CLAIMS = frozenset(text for claims in _OWN_CLAIMS.values() for text in claims)
"""The claims that are not the paper's: it did not run AutoAttack, APGD or a random score."""
