"""Training: recipes, the loop, checkpoints, records."""

from bullettrain.training.config import Config
from bullettrain.training.recipes import RECIPES, recipe
from bullettrain.training.settings import ConfigError

__all__ = ["RECIPES", "Config", "ConfigError", "recipe"]
