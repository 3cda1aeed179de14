"""Attacks: projected gradient ascent over ragged step counts, in L∞ and L2."""

from bullettrain.attacks.ascent import AscentStep
from bullettrain.attacks.losses import LOSSES, AttackLoss
from bullettrain.attacks.norms import L2, NORMS, Linf, Norm, Normalized
from bullettrain.attacks.pgd import Attack, RandomStart, pgd, random_noise, starting_point
from bullettrain.attacks.state import bare, frozen

__all__ = [
    "L2",
    "LOSSES",
    "NORMS",
    "AscentStep",
    "Attack",
    "AttackLoss",
    "Linf",
    "Norm",
    "Normalized",
    "RandomStart",
    "bare",
    "frozen",
    "pgd",
    "random_noise",
    "starting_point",
]
