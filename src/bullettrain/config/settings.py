"""Convert settings from and to text, and check their limits."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import typing
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

from bullettrain.config.format1 import RENAMED
from bullettrain.errors import UserError, raised_as
from bullettrain.schema import UNIONS, hints
from bullettrain.validation import check_known, instead, limits

TINY = 1e-30
"""Lower limit of settings that have to be above 0."""
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class ConfigError(UserError):
    """A setting is invalid. The message is one sentence with its name and the valid values."""


def limited(default: Any, least: float, most: float) -> Any:
    """Return a dataclass field for a number from ``least`` to ``most``, or for a tuple of such numbers."""
    return dataclasses.field(default=default, metadata=limits(least=least, most=most))


def limits_of(section: type, setting: str) -> dict[str, Any]:
    """Return the limits of a setting of a section."""
    (limits,) = (field.metadata["limits"] for field in dataclasses.fields(section) if field.name == setting)
    return limits  # type: ignore[no-any-return]


def find(path: str, sections: Mapping[str, type]) -> tuple[str, str, Any]:
    """Return section, key and type of a setting. ``path`` needs no section if only one section has the key."""
    kinds = {name: hints(kind) for name, kind in sections.items()}
    section, dot, key = path.rpartition(".")
    if dot:
        check_known(section, kinds, "there is no section", error=ConfigError)
    if path in kinds:
        raise ConfigError(f"{path!r} is a section; name a setting of it, e.g. {path}.{next(iter(kinds[path]))}")
    homes = [home for home, keys in kinds.items() if key in keys and section in ("", home)]
    if len(homes) > 1:
        raise ConfigError(f"{path!r} could be {' or '.join(f'{home}.{path}' for home in homes)}; say which")
    if homes:
        return homes[0], key, kinds[homes[0]][key]
    if now := [new for old, new in RENAMED.items() if path in (old, old.partition(".")[2])]:
        raise ConfigError(f"{path!r} is called {now[0].partition('.')[2]} now")
    guess = instead(key, itertools.chain(*kinds.values()), "`bullettrain train --show` lists them")
    raise ConfigError(f"there is no setting {path!r}{guess}")


def number(text: str) -> float:
    """Convert text to a number. Fractions such as 8/255 are allowed."""
    with raised_as(ConfigError, f"{text!r} is no number; write e.g. 0.031 or 8/255", ValueError, ZeroDivisionError):
        return float(Fraction(text.replace(" ", ""))) if "/" in text else float(text)


def as_setting(value: Any) -> str:
    """Return a value as `--set` takes it."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return ",".join(as_setting(part) for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse(text: str, hint: Any, name: str) -> Any:
    """Convert the ``text`` of a setting to its type.

    Args:
        text: value as `--set` takes it.
        hint: type annotation of the setting.
        name: name of the setting, for messages.

    Raises:
        ConfigError: ``text`` is not of this type.
    """
    kinds = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
    if type(None) in kinds and text.lower() in ("null", "none", ""):
        return None
    if bool in kinds and text.lower() in BOOLEANS:
        return BOOLEANS[text.lower()]
    kind = next((kind for kind in kinds if kind not in (bool, type(None))), bool)
    if typing.get_origin(kind) is tuple:
        parts = [part for part in text.strip("[]()").split(",") if part.strip()]
        return tuple(parse(part.strip(), typing.get_args(kind)[0], name) for part in parts)
    if typing.get_origin(kind) is Literal:
        return check_known(text, typing.get_args(kind), f"{name} is", error=ConfigError)
    if kind is bool:
        raise ConfigError(f"{name} is {text!r}; write true or false")
    if kind is int:
        with contextlib.suppress(ConfigError):
            if (value := number(text)).is_integer():
                return int(text) if text.lstrip("+-").isdigit() else int(value)  # a float rounds large seeds
        raise ConfigError(f"{name} is {text!r}; it has to be a whole number")
    with raised_as(ConfigError, f"{name}: {{error}}", ConfigError):
        return number(text) if kind is float else text
