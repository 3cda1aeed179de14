"""What the paper reports, each figure once: by what is trained, then by the row of its table."""

from __future__ import annotations

from bullettrain.training.config import COMPUTED, Config
from bullettrain.training.recipes import RECIPES, recipe

Figures = dict[str, float]


def _figures(
    clean: float, pgd20: float, theoretical: float | None, wall: float | None, *shares: float, **stronger: float
) -> Figures:
    names = ("clean", "pgd20", "theoretical", "wall", "boundary", "robust", "outlier")
    found = dict(zip(names, (clean, pgd20, theoretical, wall, *shares), strict=False)) | stronger
    return {name: value for name, value in found.items() if value is not None}


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
"""Accuracies and shares of the classes in percent (WRN-34-10 on CIFAR-10; AugMix: WRN-40-2), speed-ups as ratios."""
ROBUSTBENCH_TRADES = 53.08
"""AutoAttack accuracy of the TRADES authors' network in RobustBench, which is not in the paper."""

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
"""By recipe and by steps for boundary, robust and outlier examples."""
_HARMLESS = COMPUTED | {
    *("training.precision", "data.test_size", "evaluation.steps", "evaluation.step_size", "evaluation.restarts"),
    *("method.robust", "method.outlier", "method.separation"),  # told apart by the table above
}
"""Settings that leave a recipe the paper's: how it is computed and evaluated, not what is learnt."""


def paper_figure(config: Config | None, attack: str, eps: float | None, data: str) -> float | None:
    """The paper's accuracy, as a share, of such a run under ``attack`` at ``eps``; None where it has none."""
    if config is None or config.recipe not in RECIPES or data != config.data.name:
        return None
    if eps is not None and (eps != config.method.eps or config.method.norm != "linf"):
        return None
    if recipe(config.recipe).differences(config).keys() - _HARMLESS:
        return None
    method = config.method
    found = _ROWS.get((config.recipe, method.boundary, method.robust, method.outlier), {}).get(attack)
    return None if found is None else found / 100


def paper_boundary(name: str) -> float | None:
    """The share of boundary examples that the paper reports for what the recipe ``name`` trains with BulletTrain."""
    name = name.removesuffix("-fast")
    steps = (1, 0, 0) if name.endswith("augmix") else (10, 2, 0)
    found = _ROWS.get((name, *steps), {}).get("boundary")
    return None if found is None else found / 100
