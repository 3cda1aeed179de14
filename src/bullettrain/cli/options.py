"""Checks of options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bullettrain.cli.commands import Model
from bullettrain.config.settings import ConfigError
from bullettrain.errors import raised_as
from bullettrain.loading import LoadedModel, load_model
from bullettrain.processes import find_place
from bullettrain.run_folder import try_folder


def check_apart(**options: object) -> None:
    """Raise ConfigError if more than one of these options is set."""
    names = [f"--{name.replace('_', '-')}" for name, value in options.items() if value not in (None, False)]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} do not go together; give one of them")


def check_out(folder: Path) -> None:
    """Create the folder for results. Raises ConfigError if it cannot be written."""

    def unwritable(error: OSError) -> str:
        return f"--out cannot be written ({error.filename or folder}: {error.strerror}); choose another --out"

    with raised_as(ConfigError, unwritable, OSError):
        try_folder(folder)


def one_process(device: str | None) -> torch.device:
    """Return the device. Raises ConfigError under torchrun."""
    place = find_place(device)
    if place.together:
        raise ConfigError("this command runs in one process, or starts its own (--jobs); start it without torchrun")
    return place.device


def load(options: Model, **shape: Any) -> LoadedModel:
    """Load the network of the options. ``shape`` is the image shape, if the model does not record it."""
    fields = options.model, options.weights, options.network, options.trust, options.mean, options.std
    return load_model(*fields, **shape)
