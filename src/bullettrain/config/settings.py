"""Settings as text: what `--set` takes and what is shown of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
import typing
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

from bullettrain.config.format1 import RENAMED
from bullettrain.errors import UserError
from bullettrain.validation import instead

TINY = 1e-30
"""The least that something above 0 may be."""
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class ConfigError(UserError):
    """A setting that cannot be: one sentence with the key and what there is."""


def limited(default: Any, least: float, most: float) -> Any:
    """A setting that is a number from ``least`` to ``most``, or a list of such numbers."""
    return dataclasses.field(default=default, metadata={"limits": (least, most)})


def limits_of(section: type, setting: str) -> tuple[float, float]:
    """The least and the most that a setting of a section may be."""
    (limits,) = (field.metadata["limits"] for field in dataclasses.fields(section) if field.name == setting)
    return limits  # type: ignore[no-any-return]


def check_limits(name: str, section: Any) -> None:
    """ConfigError where a setting of a section, called ``name``, is out of its limits."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if value is None or "limits" not in field.metadata:
            continue
        least, most = field.metadata["limits"]
        for part in value if isinstance(value, tuple) else (value,):
            if not least <= part <= most:  # NaN is neither
                wrong = f"{name}.{field.name} is {part}"
                raise ConfigError(f"{wrong}; it has to be at least {least:g} and at most {most:g}")


def find(path: str, sections: Mapping[str, type]) -> tuple[str, str, Any]:
    """Section, key and type of the setting that is called ``path``; a key of one section only needs no section."""
    hints = {name: typing.get_type_hints(kind) for name, kind in sections.items()}
    section, dot, key = path.rpartition(".")
    if dot and section not in hints:
        raise ConfigError(f"there is no section {section!r}{instead(section, hints)}")
    if path in hints:
        raise ConfigError(f"{path!r} is a section; name a setting of it, e.g. {path}.{next(iter(hints[path]))}")
    homes = [home for home, keys in hints.items() if key in keys and section in ("", home)]
    if len(homes) > 1:
        raise ConfigError(f"{path!r} could be {' or '.join(f'{home}.{path}' for home in homes)}; say which")
    if homes:
        return homes[0], key, hints[homes[0]][key]
    if now := [new for old, new in RENAMED.items() if path in (old, old.partition(".")[2])]:
        raise ConfigError(f"{path!r} is called {now[0].partition('.')[2]} now")
    guess = instead(key, itertools.chain(*hints.values()), "`bullettrain train --show` lists them")
    raise ConfigError(f"there is no setting {path!r}{guess}")


def number(text: str) -> float:
    """A number, or a fraction such as 8/255."""
    try:
        return float(Fraction(text.replace(" ", ""))) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{text!r} is no number; write e.g. 0.031 or 8/255") from None


def as_setting(value: Any) -> str:
    """A value as `--set` takes it."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return ",".join(as_setting(part) for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse(text: str, hint: Any, name: str) -> Any:
    """``text`` as the type that the setting has."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)  # a Literal makes the latter
    options = typing.get_args(hint) if union else (hint,)
    if text.lower() in ("null", "none", "") and type(None) in options:
        return None
    kind = next(option for option in options if option is not type(None))
    if kind is bool and float in options and text.lower() not in BOOLEANS:
        kind = float  # a share, where true is all
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise ConfigError(f"{name} is {text!r}{instead(text, choices)}")
        return text
    if typing.get_origin(kind) is tuple:
        parts = [part for part in text.strip("[]()").split(",") if part.strip()]
        return tuple(parse(part.strip(), typing.get_args(kind)[0], name) for part in parts)
    if kind is bool:
        if text.lower() not in BOOLEANS:
            raise ConfigError(f"{name} is {text!r}; write true or false")
        return BOOLEANS[text.lower()]
    if kind is str:
        return text
    try:
        value = number(text)
    except ConfigError as error:
        if kind is int:
            raise ConfigError(f"{name} is {text!r}; it has to be a whole number") from None
        raise ConfigError(f"{name}: {error}") from None
    if kind is int:
        if not math.isfinite(value) or value != int(value):
            raise ConfigError(f"{name} is {text}; it has to be a whole number")
        return int(text) if text.lstrip("+-").isdigit() else int(value)  # a float has not all digits of a seed
    return value
