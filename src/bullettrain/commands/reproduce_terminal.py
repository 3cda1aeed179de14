"""What `bullettrain reproduce` says on a terminal: what there is, what would run, and what came out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bullettrain.reproduction import tables
from bullettrain.reproduction.records import Record, read_records
from bullettrain.reproduction.results import NOT_RUN, Results, Verdict
from bullettrain.reproduction.scales import SCALES
from bullettrain.reproduction.studies import STUDIES
from bullettrain.reproduction.tasks import DONE, ON_RECORD, Task, seconds_left
from bullettrain.terminal import duration, fits, say, say_rows

RESULTS = Path(__file__).resolve().parents[3] / "results" / "reproduce"
"""Records of a checkout."""
STYLES: dict[Verdict | None, str] = dict(zip(Verdict, ("green", "yellow", "yellow", "red", "dim"), strict=True))
SHORT = {
    **{"shares": "B / R / O %", "corruptions": "corr. %", "rank_correct": "ρ, correct"},
    **{"theoretical": "theor. ×", "wall": "wall ×"},
}
MANY = 30
"""Rows of which only those that were run are listed."""


def show_list(console: Console) -> None:
    """All that can be reproduced, and the scales."""
    say_rows(console, [(Text(study.name, "bold"), study.title) for study in STUDIES.values()])
    console.print()
    say_rows(console, [(Text.assemble("--scale ", (scale.name, "bold")), scale.about) for scale in SCALES.values()])


def show(console: Console, results: Results) -> None:
    """The table with as much as there is room for, what is to be said of rows, and the claims."""
    console.print(results.study.title, style="bold")
    columns = tables.columns(results)
    titles = fits(console, _table(results, columns, titles=True))
    for number, part in enumerate([columns] if titles else _parts(console, results, columns)):
        if number:
            console.print()
        console.print(_table(results, part, titles=titles))
    if any(column.baseline for column in columns):
        brackets = ", and in brackets the paper's" if any(column.paper for column in columns) else ""
        console.print(f"to base: points against its baseline{brackets}", style="dim")
    statuses: dict[str, list[str]] = {}
    for row in results.rows.values():
        if (status := results.status(row)) and (status != NOT_RUN or len(results.rows) <= MANY):
            statuses.setdefault(status, []).append(row.title if titles else row.name)
    for status, rows in statuses.items():
        say(console, f"{status}: {'; '.join(rows)}", style="dim")
    for note in results.notes():
        say(console, note, style="dim")
    if results.claims:
        _show_claims(console, results)
    if not results.scale.like_paper:
        say(console, "scale smoke: it runs, and the figures mean nothing", style="dim")


def _show_claims(console: Console, results: Results) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for verdict, allowed, text, _ in tables.claims(results):
        table.add_row(Text(f"{tables.MARKS[verdict]} {verdict.value}", STYLES[verdict]), text + allowed)
    console.print(table)


def _parts(console: Console, results: Results, columns: Sequence[tables.Column]) -> Iterator[list[tables.Column]]:
    """The columns, as many at a time as there is room for: a table each."""
    part: list[tables.Column] = []
    for column in columns:
        if part and not fits(console, _table(results, [*part, column])):
            yield part
            part = []
        part.append(column)
        if len(part) == 1 and not fits(console, _table(results, part)):  # the paper's figure is in the files
            part = [dataclasses.replace(column, paper=False)]
    yield part


def _table(results: Results, columns: Sequence[tables.Column], *, titles: bool = False) -> Table:
    """The rows, by their names or by whole titles."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(SHORT.get(column.metric, column.heading), justify="right", no_wrap=True)
        if column.paper:
            table.add_column("paper", justify="right", style="dim", no_wrap=True)
        if column.baseline:
            table.add_column("to base", justify="right", no_wrap=True)
    for row in results.rows.values():
        run = bool(results.runs[row.name])
        if len(results.rows) > MANY and not run:
            continue
        cells = [
            Text(cell.marked, STYLES.get(cell.verdict, "") if cell.marked != cell.text else "")
            for cell in tables.cells(results, row, columns, paper="{}")
        ]
        table.add_row(row.title if titles else row.name, *cells, style=None if run else "dim")
    return table


def forecast(
    console: Console, title: str, tasks: Sequence[Task], records: Mapping[str, Record], device: str, jobs: int
) -> None:
    """What would run, and how long its training took where it was measured: here, or on record in a checkout."""
    say(console, f"{title}, on {device}", style="bold")
    on_record = dict(records)
    for folder in sorted(RESULTS.glob("*/records")):
        on_record = read_records(folder) | on_record
    table = Table(box=None, pad_edge=False)
    for heading in ("row", "state", "training", "measured on"):
        table.add_column(heading, justify="right" if heading == "training" else "left", overflow="fold")
    total, unknown = 0.0, 0
    for task in tasks:
        state = task.state()
        cells = ["", ""]
        if state not in (DONE, ON_RECORD):
            found = seconds_left(task, on_record, device)
            cells = [duration(found[0]), found[1]] if found else ["not measured", ""]
            total, unknown = total + (found[0] if found else 0.0), unknown + (found is None)
        table.add_row(task.label, state, *cells)
    console.print(table)
    besides = f", besides {unknown} that {'was' if unknown == 1 else 'were'} not measured" if unknown else ""
    lines = [f"altogether {duration(total)} of training, one run after another{besides}"]
    if jobs > 1:
        lines.append(f"{jobs} concurrent runs share the device: how much sooner they are done is not measured")
    lines.append("without compilation and evaluation, of which AutoAttack may take longer than training")
    say(console, "\n".join(lines))
