"""The settings of a run, and the recipes."""

from bullettrain.config.recipes import RECIPES, recipe
from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError

__all__ = ["RECIPES", "Config", "ConfigError", "recipe"]
