"""What `bullettrain reproduce` says on a terminal: what there is, what would run, and what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from bullettrain.reproduction import tables
from bullettrain.reproduction.records import Record, read_csv, read_records
from bullettrain.reproduction.results import NOT_RUN, Results, Verdict
from bullettrain.reproduction.runs import DONE, ON_RECORD, Task
from bullettrain.reproduction.scales import SCALES, Scale
from bullettrain.reproduction.studies import LARGE, STUDIES, Row
from bullettrain.terminal import duration, say, say_rows, show_table

CHECKOUT = Path(__file__).resolve().parents[3] / "results"
"""What is on record where this is a checkout."""
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
    columns, few = list(tables.columns(results)), len(results.rows) <= MANY
    rows = [row for row in results.rows.values() if few or results.runs[row.name]]
    headings = [
        SHORT.get(column.metric, column.heading) if column.kind == "ours" else column.heading for column in columns
    ]
    ours = [heading for heading, column in zip(headings, columns, strict=True) if column.kind == "ours"]
    if not show_table(
        console,
        ["row", "", *headings],
        [[row.name, row.title, *(_cell(results, row, column) for column in columns)] for row in rows],
        left=[""],
        dropped=["", *sorted(set(headings) - set(ours), reverse=True), *reversed(ours[1:])],  # "paper" first
        styles=["" if results.runs[row.name] else "dim" for row in rows],
    ):
        say(console, f"{results.study.name}.md has all columns", style="dim")
    statuses: dict[str, list[str]] = {}
    for row in results.rows.values():
        if (status := results.status(row)) and (status != NOT_RUN or few):
            statuses.setdefault(status, []).append(row.name)
    for text in (*(f"{status}: {'; '.join(names)}" for status, names in statuses.items()), *results.notes()):
        say(console, text, style="dim")
    marks = {verdict: Text(f"{tables.MARKS[verdict]} {verdict.value}", STYLES[verdict]) for verdict in Verdict}
    say_rows(console, [(marks[verdict], text + allowed) for verdict, allowed, text, _ in tables.claims(results)])
    if not results.scale.like_paper:
        say(console, "scale smoke: it runs, and the figures mean nothing", style="dim")


def _cell(results: Results, row: Row, column: tables.Column) -> Text:
    cell = tables.cell(results, row, column)
    return Text(cell.marked, STYLES.get(cell.verdict, "dim" if column.kind == "paper" else ""))


def on_record(scale: Scale) -> dict[str, Record]:
    """What a checkout has on record: of any scale, and of the paper's own network at this one."""
    found: dict[str, Record] = {}
    for folder in sorted(CHECKOUT.glob("reproduce/*/records")):
        found |= read_records(folder)
    table = CHECKOUT / "paper_scale.csv"
    return found | (read_csv(table, scale, STUDIES[LARGE].rows(scale)) if table.is_file() else {})


def show_plan(
    console: Console, title: str, tasks: Sequence[Task], records: Mapping[str, Record], device: str, jobs: int
) -> None:
    """What would run, and how long its training took where it was measured."""
    say(console, f"{title}, on {device}", style="bold")
    rows, total, unknown = [], 0.0, 0
    for task in tasks:
        state, cells = task.state(), ["", ""]
        if state not in (DONE, ON_RECORD):
            found = task.seconds_left(records, device)
            cells = [duration(found[0]), found[1]] if found else ["not measured", ""]
            total, unknown = total + (found[0] if found else 0.0), unknown + (found is None)
        rows.append([task.label, state, *cells])
    show_table(console, ["row", "state", "training", "measured on"], rows, left=["state", "measured on"])
    besides = f", besides {unknown} that {'was' if unknown == 1 else 'were'} not measured" if unknown else ""
    shared = f"; {jobs} concurrent runs share the device" if jobs > 1 else ""
    say(console, f"altogether {duration(total)} of training, one run after another{besides}{shared}")
    say(console, "without compilation and evaluation, of which AutoAttack may take longer than training")
