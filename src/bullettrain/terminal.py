"""The terminal that commands write to, narrow or wide, and what is not cut on it: words, numbers, names."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from bullettrain import formatting


def terminal() -> Console:
    """Standard output, where text is text: `[a]` and `:car:` in a name are no markup. What is coloured is a `Text`."""
    return Console(markup=False, emoji=False, highlight=False)


def say(console: Console, text: str | Text, *, style: str | None = None) -> None:
    """Prose: on a terminal wrapped between words, elsewhere a line is a line. What is to be copied is not for this."""
    console.print(text, style=style, soft_wrap=not console.is_terminal)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        text: str | Text = self.format(record)
        if record.levelno >= logging.WARNING:
            text = Text.assemble(("warning", "bold red"), f" {text}")
        say(self.console, text)


@contextmanager
def logged(console: Console, name: str = "bullettrain") -> Iterator[None]:
    """Show on ``console`` what the package, or the part of it that is called ``name``, logs meanwhile."""
    logger, handler = logging.getLogger(name), _ConsoleHandler(console)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def say_rows(console: Console, rows: Iterable[Sequence[str | Text]]) -> None:
    """Names and what they are, one below the other; the last column alone is wrapped."""
    rows = list(rows)
    table = Table.grid(padding=(0, 2))
    for _ in rows[0][1:]:
        table.add_column(no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    console.print(table)


def percent(share: float | None) -> str:
    """0.8146 as 81.5 %."""
    return formatting.plain(formatting.percent(math.nan if share is None else share))


def duration(seconds: float) -> str:
    """12.3 s, 5 min 12 s, 1 h 23 min."""
    return formatting.plain(formatting.duration(seconds))


def fits(console: Console, table: Table) -> bool:
    """Whether there is room for everything in a table."""
    return Measurement.get(console, console.options.update(width=1000), table).maximum <= console.width


def fitting(
    console: Console, make: Callable[[Sequence[str]], Table], columns: Sequence[str], dropped: Sequence[str]
) -> Table:
    """The table that ``make`` makes of as many columns as there is room for; the ``dropped`` go, first one first."""
    table = make(columns)
    for name in dropped:
        if fits(console, table):
            break
        columns = [column for column in columns if column != name]
        table = make(columns)
    return table
