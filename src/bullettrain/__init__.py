"""BulletTrain: training of robust neural networks with less compute, by boundary example mining."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bullettrain import attacks, augmix, baselines, data, models, objectives
    from bullettrain.allocation import (
        Allocated,
        Allocation,
        EarlyStopBudget,
        GaussianBudget,
        HistoryBudget,
        RadiusBudget,
        SecondStepBudget,
        ShuffledBudget,
        StepBudget,
    )
    from bullettrain.attacks import Normalized
    from bullettrain.cost import theoretical_speedup
    from bullettrain.engine.captured import Captured
    from bullettrain.history import History, HistorySampler, LeaveOut
    from bullettrain.loading import load
    from bullettrain.mining import (
        Category,
        RobustFraction,
        random_score,
        separate,
        signed_cross_entropy,
        signed_gradient_norm,
        signed_margin,
        signed_prediction_variance,
    )
    from bullettrain.objectives import MART, PGDAT, TRADES, AugMix, Objective
    from bullettrain.oracle import OracleSeparation
    from bullettrain.step import BulletTrain, StepOutput

__version__ = "0.1.0"

__all__ = [
    "MART",
    "PGDAT",
    "TRADES",
    "Allocated",
    "Allocation",
    "AugMix",
    "BulletTrain",
    "Captured",
    "Category",
    "EarlyStopBudget",
    "GaussianBudget",
    "History",
    "HistoryBudget",
    "HistorySampler",
    "LeaveOut",
    "Normalized",
    "Objective",
    "OracleSeparation",
    "RadiusBudget",
    "RobustFraction",
    "SecondStepBudget",
    "ShuffledBudget",
    "StepBudget",
    "StepOutput",
    "__version__",
    "attacks",
    "augmix",
    "baselines",
    "data",
    "load",
    "models",
    "objectives",
    "random_score",
    "separate",
    "signed_cross_entropy",
    "signed_gradient_norm",
    "signed_margin",
    "signed_prediction_variance",
    "theoretical_speedup",
]

_NAMES = {
    "allocation": (
        *("Allocated", "Allocation", "EarlyStopBudget", "GaussianBudget", "HistoryBudget", "RadiusBudget"),
        *("SecondStepBudget", "ShuffledBudget", "StepBudget"),
    ),
    "attacks": ("Normalized",),
    "cost": ("theoretical_speedup",),
    "engine.captured": ("Captured",),
    "history": ("History", "HistorySampler", "LeaveOut"),
    "loading": ("load",),
    "mining": (
        *("Category", "RobustFraction", "random_score", "separate", "signed_cross_entropy", "signed_gradient_norm"),
        *("signed_margin", "signed_prediction_variance"),
    ),
    "objectives": ("MART", "PGDAT", "TRADES", "AugMix", "Objective"),
    "oracle": ("OracleSeparation",),
    "step": ("BulletTrain", "StepOutput"),
}
"""Public names by the module that defines them. They are imported when they are first used, so that `import
bullettrain` and the command's help need not wait for torch."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(f"bullettrain.{_MODULES[name]}"), name)
    elif name in __all__:
        value = importlib.import_module(f"bullettrain.{name}")
    else:
        raise AttributeError(f"module 'bullettrain' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
