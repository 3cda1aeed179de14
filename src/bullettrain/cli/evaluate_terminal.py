"""The tables at the end of `bullettrain evaluate`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from bullettrain.config.sections import Config
from bullettrain.evaluation.progress import interval, share
from bullettrain.evaluation.results import Entry, Result
from bullettrain.reporting.attack_rows import AttackRow, difference, mean_in_words, rows, weakest
from bullettrain.terminal import duration, say, show_table

STYLES = {"attack": "", "part": "dim", "worst": "bold"}
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
        styles = [STYLES[row.kind] for row in found]
        show_table(console, COLUMNS, map(_cells, found), left=["threat"], dropped=DROPPED, styles=styles)
    for result in asked:
        if result.corruptions:
            severities = [
                [name.replace("_", " "), *(f"{100 * value:.1f}" for value in (sum(values) / len(values), *values))]
                for name, values in result.corruptions["accuracy"].items()
            ]
            show_table(console, ["corruption, %", "mean", "1", "2", "3", "4", "5"], severities)
            say(console, mean_in_words(result))
    for text in (weakest(entry, asked), difference(asked, entry.results)):
        if text:
            say(console, text)
    for warning in entry.warnings:
        say(console, Text.assemble(("warning", "bold yellow"), f" {warning}"))
    if curves and not entry.warnings:
        say(console, "no sign of gradient masking")


def _cells(row: AttackRow) -> list[str]:
    return [
        f"  {row.name}" if row.kind == "part" else row.name,
        row.threat,
        share(row.accuracy),
        interval(row.interval).strip("()") if row.interval else "",
        share(row.paper) if row.paper is not None else "",
        duration(row.seconds) if row.seconds is not None else "",
    ]
