"""Print text and tables to the terminal."""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from bullettrain import formatting


def terminal() -> Console:
    """Return a console for standard output without markup. Use ``Text`` for styled text."""
    return Console(markup=False, emoji=False, highlight=False)


def say(console: Console, text: str | Text, *, style: str | None = None) -> None:
    """Print prose, wrapped at words on a terminal. Print paths and commands unwrapped, so that they can be copied."""
    console.print(text, style=style, soft_wrap=not console.is_terminal)


def say_interrupted(console: Console, command: str, how: str = "resume with", signal: int | None = None) -> NoReturn:
    """Print the command that resumes after an interruption, and exit with the status of ``signal`` (None: Ctrl-C)."""
    console.print(f"interrupted; {how}:\n  {command}", soft_wrap=True)
    sys.exit(128 + (signal or 2))


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
    """Show log messages of the logger ``name`` on ``console``."""
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
    """Print rows in aligned columns. Only the last column wraps."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    for column in table.columns[:-1]:
        column.no_wrap = True
    console.print(table)


def percent(share: float | None) -> str:
    """Format 0.8146 as 81.5 %."""
    return formatting.plain(formatting.percent(math.nan if share is None else share))


def duration(seconds: float) -> str:
    """Format seconds as 12.3 s, 5 min 12 s or 1 h 23 min."""
    return formatting.plain(formatting.duration(seconds))


def show_table(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    left: Collection[str] = (),
    dropped: Sequence[str] = (),
    styles: Iterable[str] = itertools.repeat(""),
) -> bool:
    """Print a table without its empty columns.

    Args:
        console: console to print to.
        headings: headings of the columns.
        rows: cells of each row.
        left: headings of left-aligned columns, besides the first.
        dropped: headings of columns to leave out if the terminal is too narrow, in this order.
        styles: styles of the rows.

    Returns:
        Whether all columns fit.
    """
    styled = list(zip(rows, styles, strict=False))
    filled = [index for index in range(len(headings)) if any(row[index] for row, _ in styled)]
    for count in range(len(dropped) + 1):
        kept = [index for index in filled if headings[index] not in dropped[:count]]
        table = Table(box=None, pad_edge=False)
        for index in kept:
            text = index == 0 or headings[index] in left
            table.add_column(headings[index], justify="left" if text else "right", no_wrap=not text, overflow="fold")
        for row, style in styled:
            table.add_row(*(row[index] for index in kept), style=style)
        if Measurement.get(console, console.options.update(width=1000), table).maximum <= console.width:
            break
    console.print(table)
    return count == 0
