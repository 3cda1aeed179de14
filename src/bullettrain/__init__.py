"""BulletTrain: robust training of neural networks at a fraction of the cost, by boundary example mining."""

from bullettrain.allocation import StepBudget, theoretical_speedup
from bullettrain.attacks import Normalized
from bullettrain.engine import BulletTrain, Captured, StepOutput
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

__version__ = "0.1.0"

__all__ = [
    "MART",
    "PGDAT",
    "TRADES",
    "AugMix",
    "BulletTrain",
    "Captured",
    "Category",
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
