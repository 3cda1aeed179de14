"""The terminal that commands write to."""

from __future__ import annotations

from rich.console import Console


def terminal() -> Console:
    """Standard output, where text is text: `[a]` and `:car:` in a name are no markup. What is coloured is a `Text`."""
    return Console(markup=False, emoji=False, highlight=False)
