"""Training: recipes, the loop, checkpoints, records."""

from bullettrain.training.config import Config, ConfigError
from bullettrain.training.recipes import RECIPES, recipe

__all__ = ["RECIPES", "Config", "ConfigError", "recipe"]
