"""Recipes from files: YAML as `bullettrain train --show` prints it, or the folder of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bullettrain.checkpoint_paths import check_run, rather
from bullettrain.config.format1 import without_gone
from bullettrain.config.recipes import RECIPES, recipe
from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError
from bullettrain.errors import near, raised_as, read_settings_text, user_path
from bullettrain.extras import extra
from bullettrain.loading import permitted
from bullettrain.validation import instead

GIVE = "give a recipe, a YAML file or a run's folder"


def find_recipe(name: str, *, network: str | None = None, trust: bool = False) -> Config:
    """Return the config of a recipe, a YAML file or a run's folder.

    Args:
        name: of a recipe, or a path.
        network: replaces the recipe's network.
        trust: allow to import and call the function that a file names as its network.

    Raises:
        ConfigError: there is no such recipe, or its settings are invalid.
        RunError: the file cannot be read, or names a function without permission.
    """
    config = read_recipe(name)
    allowed = permitted(config.network.name, Path(name), network=network, trust=trust or name in RECIPES)
    return config.replace_section("network", name=allowed)


def read_recipe(name: str) -> Config:
    """Like :func:`find_recipe`, without its check of the network: do not build it."""
    path = user_path(name)
    if name in RECIPES or not path.exists():
        if path.suffix in (".yaml", ".yml") or os.sep in name:
            raise ConfigError(f"{name} is missing; {GIVE}{near(path)}")
        return recipe(name)
    if path.is_dir():
        return check_run(path).config()
    with extra("a recipe's file"):
        import yaml
    unread = f"{name} cannot be read as YAML ({{error}}); {rather(path, GIVE)}"
    with raised_as(ConfigError, unread, OSError, ValueError, yaml.YAMLError, RecursionError):
        values = yaml.safe_load(read_settings_text(path))
    values = without_gone(values) if isinstance(values, Mapping) else values
    base = values.get("recipe") if isinstance(values, Mapping) else None
    with raised_as(ConfigError, f"{name}: {{error}}", ConfigError):
        if isinstance(base, str) and base in RECIPES:
            values = _merged(recipe(base).to_dict(), values)
        elif base is not None and not isinstance(base, str):
            raise ConfigError(f"recipe is {base!r}; it has to be text{instead(str(base), RECIPES)}")
        config = Config.from_dict(values)
    return config if base in RECIPES else replace(config, recipe=name)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated with ``changes``, section by section."""
    sections = {
        key: {**base[key], **value} if isinstance(value, Mapping) and isinstance(base.get(key), Mapping) else value
        for key, value in changes.items()
    }
    return {**base, **sections}
