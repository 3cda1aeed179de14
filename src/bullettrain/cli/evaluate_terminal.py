"""The tables at the end of `bullettrain evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bullettrain.config.sections import Config
from bullettrain.evaluation.progress import interval, share
from bullettrain.evaluation.results import Entry, Result
from bullettrain.reporting.attack_rows import AttackRow, difference, mean_in_words, rows, weakest
from bullettrain.terminal import duration, fitting, say

STYLES: dict[str, str | None] = {"attack": None, "part": "dim", "worst": "bold"}
COLUMNS = ("attack", "threat", "accuracy", "95 %", "paper", "time")
DROPPED = ("time", "95 %", "threat")
"""What a narrow terminal does without, first one first; the file and the report have it."""


def show(console: Console, entry: Entry, asked: Sequence[Result], config: Config | None, *, curves: bool) -> None:
    """Everything that was asked for, the worst case, the weakest class, differences, warnings."""
    precisions = list(dict.fromkeys(result.precision for result in asked))
    for precision in precisions:
        found = rows(entry, [result for result in asked if result.precision == precision], config)
        named = f", {precision}" if precisions != ["float32"] else ""
        console.print(f"{entry.model}{named}", style="bold", soft_wrap=True)
        columns = [name for name in COLUMNS if name != "paper" or any(row.paper is not None for row in found)]
        console.print(fitting(console, partial(_table, found), columns, DROPPED))
    for result in asked:
        if result.corruptions:
            console.print(_corruptions(result))
            say(console, mean_in_words(result))
    for text in (weakest(entry, asked), difference(asked, entry.results)):
        if text:
            say(console, text)
    for warning in entry.warnings:
        say(console, Text.assemble(("warning", "bold yellow"), f" {warning}"))
    if curves and not entry.warnings:
        say(console, "no sign of gradient masking")


def _table(found: Sequence[AttackRow], columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        side: Literal["left", "right"] = "left" if name in ("attack", "threat") else "right"
        table.add_column(name, justify=side, no_wrap=True)
    for row in found:
        cells = {
            "attack": f"  {row.name}" if row.kind == "part" else row.name,
            "threat": row.threat,
            "accuracy": share(row.accuracy),
            "95 %": interval(row.interval).strip("()") if row.interval else "",
            "paper": share(row.paper) if row.paper is not None else "",
            "time": duration(row.seconds) if row.seconds is not None else "",
        }
        table.add_row(*(cells[name] for name in columns), style=STYLES[row.kind])
    return table


def _corruptions(result: Result) -> Table:
    """Accuracy by corruption and severity, in percent."""
    table = Table(box=None, pad_edge=False)
    table.add_column("corruption, %")
    for heading in ("mean", "1", "2", "3", "4", "5"):
        table.add_column(heading, justify="right")
    for name, values in result.corruptions["accuracy"].items():
        cells = [f"{100 * value:.1f}" for value in (sum(values) / len(values), *values)]
        table.add_row(name.replace("_", " "), *cells)
    return table
