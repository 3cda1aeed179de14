"""What the paper reports, for recipes that are the paper's."""

from __future__ import annotations

from bullettrain.training.config import Config
from bullettrain.training.recipes import RECIPES, recipe

HARMLESS = {
    *("training.seed", "training.engine", "training.joint", "training.bucket", "training.precision"),
    *("training.channels_last", "training.compile", "training.average", "training.threads", "training.log_every"),
    *("training.save_minutes", "training.probe", "data.test_size"),
    *("evaluation.batch_size", "evaluation.steps", "evaluation.step_size", "evaluation.restarts"),
    "evaluation.search",
    *("method.robust", "method.outlier", "method.separation"),  # told apart by the table below
}
"""Settings that leave a recipe the paper's: how it is computed and judged, not what is learnt."""

# By recipe and by steps for boundary, robust and outlier examples; accuracy by attack, in percent.
FIGURES: dict[tuple[str, int, int, int], dict[str, float]] = {
    ("cifar10-trades", 10, 10, 10): {"clean": 84.92, "pgd20": 56.61, "pgd100x10": 54.33, "pgd1000x5": 54.49},
    ("cifar10-trades", 10, 2, 0): {"clean": 85.89, "pgd20": 56.35, "pgd100x10": 54.32, "pgd1000x5": 54.41},
    ("cifar10-trades", 10, 0, 0): {"clean": 87.50, "pgd20": 52.10},
    ("cifar10-mart", 10, 10, 10): {"clean": 84.17, "pgd20": 57.39},
    ("cifar10-mart", 10, 1, 0): {"clean": 87.12, "pgd20": 58.11},
    ("cifar10-mart", 10, 2, 0): {"clean": 86.60, "pgd20": 58.74},
    ("cifar10-augmix", 1, 1, 1): {"corruptions": 88.8},
    ("cifar10-augmix", 1, 0, 0): {"corruptions": 88.8},
    ("cifar100-augmix", 1, 1, 1): {"corruptions": 64.0},
    ("cifar100-augmix", 1, 0, 0): {"corruptions": 63.6},
    ("mnist-pgd", 7, 7, 7): {"pgd100x20": 90.6},
}


def paper_figure(config: Config | None, attack: str, eps: float | None, data: str) -> float | None:
    """The paper's accuracy, as a share, of such a run under ``attack`` at ``eps``; None where it has none."""
    if config is None or config.recipe not in RECIPES or data != config.data.name:
        return None
    if eps is not None and (eps != config.method.eps or config.method.norm != "linf"):
        return None
    if recipe(config.recipe).differences(config).keys() - HARMLESS:
        return None
    method = config.method
    found = FIGURES.get((config.recipe, method.boundary, method.robust, method.outlier), {}).get(attack)
    return None if found is None else found / 100
