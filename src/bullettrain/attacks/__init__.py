"""Attacks: projected gradient ascent over ragged step counts, in L∞ and L2."""

from bullettrain.attacks.losses import LOSSES, AttackLoss
from bullettrain.attacks.norms import L2, NORMS, Linf, Norm
from bullettrain.attacks.pgd import pgd, random_noise
from bullettrain.attacks.state import bare, frozen

__all__ = ["L2", "LOSSES", "NORMS", "AttackLoss", "Linf", "Norm", "bare", "frozen", "pgd", "random_noise"]
