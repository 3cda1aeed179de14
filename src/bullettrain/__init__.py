"""BulletTrain: robust training of neural networks at a fraction of the cost, by boundary example mining."""

from bullettrain.allocation import Allocated, Allocation, GaussianBudget, HistoryBudget, StepBudget
from bullettrain.attacks import Normalized
from bullettrain.cost import theoretical_speedup
from bullettrain.engine.captured import Captured
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
    "GaussianBudget",
    "HistoryBudget",
    "Normalized",
    "Objective",
    "OracleSeparation",
    "RobustFraction",
    "StepBudget",
    "StepOutput",
    "__version__",
    "load",
    "random_score",
    "separate",
    "signed_cross_entropy",
    "signed_gradient_norm",
    "signed_margin",
    "signed_prediction_variance",
    "theoretical_speedup",
]
