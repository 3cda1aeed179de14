"""What several commands check of their options, and do with them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from bullettrain.cli.commands import Model
from bullettrain.config.settings import ConfigError
from bullettrain.loading import LoadedModel, load_model
from bullettrain.processes import find_place
from bullettrain.run_folder import try_folder
from bullettrain.validation import instead


def check_known(said: str, value: str, known: Iterable[str]) -> None:
    """ConfigError where ``value`` is none of ``known``: what is ``said`` of it, and what may have been meant."""
    known = list(known)
    if value not in known:
        raise ConfigError(f"{said} {value!r}{instead(value, known)}")


def check_apart(**given: object) -> None:
    """ConfigError where more than one of these options is given."""
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value not in (None, False)]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} do not go together; give one of them")


def check_out(folder: Path) -> None:
    """Make the folder that results are to be written to; ConfigError, before anything is computed, where it cannot."""
    try:
        try_folder(folder)
    except OSError as error:
        where = error.filename or folder
        raise ConfigError(f"--out cannot be written ({where}: {error.strerror}); choose another --out") from None


def one_process(device: str | None) -> torch.device:
    """The device that is asked for; ConfigError under torchrun."""
    place = find_place(device)
    if place.together:
        raise ConfigError("this command runs in one process, or starts its own (--jobs); start it without torchrun")
    return place.device


def load(options: Model, **shape: Any) -> LoadedModel:
    """The network that the options name; ``shape`` is that of images, where the model does not say."""
    named = options.model, options.weights, options.network, options.trust, options.mean, options.std
    return load_model(*named, **shape)
