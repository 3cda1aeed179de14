"""What the engines on static buffers are given: mini-batches, and who runs their pieces."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """A mini-batch, and what its step is to start from."""

    x: Tensor
    """(m, …) clean examples."""
    y: Tensor
    """(m,) labels."""
    start: Tensor
    """What the corruption starts from: points (m, …), or AugMix's draws."""
    which: Tensor | None = None
    """(m,) which examples these are, where the last logits select."""


Runner = Callable[[Hashable, Callable[[], None]], None]
"""Runs a function of static buffers; the key names it and its sizes."""


def at_once(key: Hashable, function: Callable[[], None]) -> None:
    """The plain runner."""
    function()
