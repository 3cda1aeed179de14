"""The paper's tables and figures, one name each: rows are recipes with settings, and everything else is data."""

from bullettrain.reproduction.scales import SCALES
from bullettrain.reproduction.studies import STUDIES, Check

__all__ = ["SCALES", "STUDIES", "Check"]
