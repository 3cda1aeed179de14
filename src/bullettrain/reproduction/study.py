"""What a study is: rows to train, what they are judged by, what the paper says of them, and how it is drawn."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bullettrain.reproduction.scales import Scale
from bullettrain.training.config import Config
from bullettrain.training.methods import with_method
from bullettrain.training.recipes import recipe
from bullettrain.training.settings import ConfigError

SHARES = ("boundary", "robust", "outlier")
"""The classes of examples, in the order in which the paper has their shares."""
RATIOS = ("theoretical", "work", "wall")
"""Speed-ups, against a row's baseline."""


@dataclass(frozen=True)
class Row:
    """One line of a table or point of a figure: a recipe with settings, and the paper's figures for it."""

    name: str
    title: str
    family: str
    """Which of a scale's recipes it changes."""
    settings: tuple[str, ...] = ()
    """As `--set` takes them."""
    plain: bool = False
    """The full number of steps for everyone, whatever the recipe says."""
    baseline: str | None = None
    """The row that it is compared with."""
    paper: Mapping[str, float] = field(default_factory=dict)
    """By metric: accuracies and shares in percent, speed-ups as ratios."""
    method: str | None = None
    """What the recipe is trained by instead, as `--method` takes it: fast, fast-3, yopo-2-5."""

    def config(self, scale: Scale, settings: Sequence[str] = ()) -> Config:
        """The run at ``scale``, with the user's own ``settings`` on top."""
        name, base = scale.recipes[self.family]
        config = recipe(name).with_settings([*base, *self.settings, *settings])
        if self.method is not None:
            return with_method(config, self.method)
        return config.baseline() if self.plain else config


Relation = Literal["≥", "≤", "≈"]


@dataclass(frozen=True)
class Check:
    """The best of ``rows``, less the row ``against``, is ≥, ≤ or within (≈) ``offset``."""

    rows: tuple[str, ...]
    metric: str
    relation: Relation
    offset: float
    against: str | None = None


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the checks that it stands on."""

    text: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Study:
    """A table or a figure of the paper."""

    name: str
    title: str
    rows: Callable[[Scale], tuple[Row, ...]]
    attacks: tuple[str, ...]
    """What every row is judged by, in the paper's names."""
    claims: Callable[[Scale], tuple[Claim, ...]] = lambda scale: ()
    columns: tuple[str, ...] = ()
    """Of its table; empty: clean accuracy, the attacks and the speed-ups."""
    figure: str | None = None
    """Name of the function that draws it, in :mod:`bullettrain.reproduction.figures`."""
    ranks: bool = False
    """Whether each row's score is compared with the oracle's classes."""
    about: str = ""
    """What to know when reading it."""

    def chosen(self, scale: Scale, patterns: Sequence[str]) -> tuple[Row, ...]:
        """The rows that ``patterns`` name, with * for any; all where there are none."""
        rows = self.rows(scale)
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(row.name, pattern) for row in rows):
                there = ", ".join(row.name for row in rows)
                raise ConfigError(f"{self.name} has no row {pattern!r} at scale {scale.name}; there are {there}")
        return tuple(
            row for row in rows if not patterns or any(fnmatch.fnmatchcase(row.name, part) for part in patterns)
        )
