"""What `bullettrain reproduce` says on a terminal: what there is, what would run, and what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bullettrain.reproduction import tables
from bullettrain.reproduction.records import Record, read_csv, read_records
from bullettrain.reproduction.results import NOT_RUN, Results, Verdict
from bullettrain.reproduction.scales import SCALES, Scale
from bullettrain.reproduction.studies import LARGE, STUDIES
from bullettrain.reproduction.tasks import DONE, ON_RECORD, Task
from bullettrain.terminal import duration, fits, say, say_rows

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
    columns, titles = list(tables.columns(results)), True
    table, dropped = _table(results, columns, titles), False
    for kind in ("titles", "paper", "gain", *["ours"] * len(columns)):
        if fits(console, table):
            break
        if kind == "titles":
            titles = False
        else:
            kept = columns[:-1] if kind == "ours" else [column for column in columns if column.kind != kind]
            columns, dropped = kept or columns, dropped or len(kept) < len(columns)
        table = _table(results, columns, titles)
    console.print(table)
    if dropped:
        say(console, f"{results.study.name}.md has all columns", style="dim")
    statuses: dict[str, list[str]] = {}
    for row in results.rows.values():
        if (status := results.status(row)) and (status != NOT_RUN or len(results.rows) <= MANY):
            statuses.setdefault(status, []).append(row.title if titles else row.name)
    for text in (*(f"{status}: {'; '.join(rows)}" for status, rows in statuses.items()), *results.notes()):
        say(console, text, style="dim")
    claims = Table.grid(padding=(0, 2))
    claims.add_column(no_wrap=True)
    for verdict, allowed, text, _ in tables.claims(results):
        claims.add_row(Text(f"{tables.MARKS[verdict]} {verdict.value}", STYLES[verdict]), text + allowed)
    if results.claims:
        console.print(claims)
    if not results.scale.like_paper:
        say(console, "scale smoke: it runs, and the figures mean nothing", style="dim")


def _table(results: Results, columns: Sequence[tables.Column], titles: bool) -> Table:
    """The rows, by their names or by whole titles."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in columns:
        heading = SHORT.get(column.metric, column.heading) if column.kind == "ours" else column.heading
        table.add_column(heading, justify="right", style="dim" if column.kind == "paper" else "", no_wrap=True)
    for row in results.rows.values():
        run = bool(results.runs[row.name])
        if run or len(results.rows) <= MANY:
            cells = [tables.cell(results, row, column) for column in columns]
            styled = [Text(cell.marked, STYLES.get(cell.verdict, "")) for cell in cells]
            table.add_row(row.title if titles else row.name, *styled, style=None if run else "dim")
    return table


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
    trained: dict[str, list[str]] = {}
    for task in tasks:
        training = task.config.training
        group = f", {training.attack_group} mini-batches attacked at once" if training.attack_group > 1 else ""
        trained.setdefault(f"{task.config.network.name}, {training.epochs} epochs{group}", []).append(task.label)
    for about, labels in trained.items():
        say(console, about if len(trained) == 1 else f"{about}: {', '.join(labels)}")
    console.print(f"runs and records in {tasks[0].out}", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for heading in ("row", "state", "training", "measured on"):
        table.add_column(heading, justify="right" if heading == "training" else "left", overflow="fold")
    total, unknown = 0.0, 0
    for task in tasks:
        state, cells = task.state(), ["", ""]
        if state not in (DONE, ON_RECORD):
            found = task.seconds_left(records, device)
            cells = [duration(found[0]), found[1]] if found else ["not measured", ""]
            total, unknown = total + (found[0] if found else 0.0), unknown + (found is None)
        table.add_row(task.label, state, *cells)
    console.print(table)
    besides = f", besides {unknown} that {'was' if unknown == 1 else 'were'} not measured" if unknown else ""
    shared = f"; {jobs} concurrent runs share the device" if jobs > 1 else ""
    say(console, f"altogether {duration(total)} of training, one run after another{besides}{shared}")
    say(console, "without compilation and evaluation, of which AutoAttack may take longer than training")
