"""Reproduction of the paper's tables and figures."""

from bullettrain.reproduction.scales import SCALES
from bullettrain.reproduction.studies import STUDIES, Check

__all__ = ["SCALES", "STUDIES", "Check"]
