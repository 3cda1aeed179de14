"""Objectives: a corruption and a surrogate loss each. Adding one is one file."""

from bullettrain.objectives.augmix import AugMix
from bullettrain.objectives.base import AdversarialObjective, Objective
from bullettrain.objectives.mart import MART
from bullettrain.objectives.pgd_at import PGDAT
from bullettrain.objectives.trades import TRADES

__all__ = ["MART", "PGDAT", "TRADES", "AdversarialObjective", "AugMix", "Objective"]
