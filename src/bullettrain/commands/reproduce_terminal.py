"""What `bullettrain reproduce` says on a terminal: what there is, what would run, and what came out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bullettrain.reproduction import tables
from bullettrain.reproduction.estimate import Estimator
from bullettrain.reproduction.results import NOT_RUN, Results, Verdict
from bullettrain.reproduction.rows import Task
from bullettrain.reproduction.scales import SCALES
from bullettrain.reproduction.studies import STUDIES
from bullettrain.terminal import fits, say, say_rows
from bullettrain.training.display import duration

STYLES = dict(zip(Verdict, ("green", "yellow", "yellow", "red", "dim"), strict=True))
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
        console.print("to base: points against its baseline, and in brackets the paper's", style="dim")
    statuses: dict[str, list[str]] = {}
    for row in results.rows.values():
        if (status := results.status(row)) and (status != NOT_RUN or len(results.rows) <= MANY):
            statuses.setdefault(status, []).append(row.title if titles else row.name)
    for status, rows in statuses.items():
        say(console, f"{status}: {'; '.join(rows)}", style="dim")
    for note in results.notes():
        say(console, note, style="dim")
    if results.claims():
        _show_claims(console, results)
    if not results.scale.like_paper:
        say(console, "scale smoke: it runs, and the figures mean nothing", style="dim")


def _show_claims(console: Console, results: Results) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for claim in results.claims():
        verdict, judged = results.verdict(claim)
        said = f"{tables.MARKS[verdict]} {verdict.value}"
        table.add_row(Text(said, STYLES[verdict]), claim.text + tables.allowed(verdict, judged))
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
        cells: list[str | Text] = []
        for column in columns:
            cells.append(_coloured(tables.ours(results, row, column.metric, beside=column.baseline)))
            cells += [tables.paper(row, column.metric)] if column.paper else []
            gained = tables.gain(results, row, column.metric, paper=column.paper)
            cells += [_coloured(gained)] if column.baseline else []
        table.add_row(row.title if titles else row.name, *cells, style=None if run else "dim")
    return table


def _coloured(cell: tables.Cell) -> str | Text:
    if cell.verdict in (None, Verdict.OPEN):
        return cell.text
    return Text(f"{cell.text} {tables.MARKS[cell.verdict]}", STYLES[cell.verdict])


def _state(task: Task) -> str:
    """How far it is."""
    if not task.is_left:
        return "done" if task.done else "on record"
    epochs, all_of_them = task.epochs_done, task.config.training.epochs
    return "trained" if epochs == all_of_them else f"epoch {epochs} of {all_of_them}" if epochs else "new"


def forecast(console: Console, title: str, tasks: Sequence[Task], estimator: Estimator, jobs: int) -> None:
    """What would run, and for how long."""
    say(console, f"{title}, on {estimator.place.device}", style="bold")
    table = Table(box=None, pad_edge=False)
    for heading in ("row", "state", "training", "judging"):
        table.add_column(heading, justify="left" if heading in ("row", "state") else "right", overflow="fold")
    total = 0.0
    for task in tasks:
        state, times = _state(task), ["", ""]
        if task.is_left:
            training, judging = estimator.seconds(task)
            times = [duration(training), duration(judging)]
            total += training + judging
        table.add_row(task.label, state, *times)
    console.print(table)
    lines = [f"altogether about {duration(total)}, one run after another"]
    if jobs > 1:
        lines.append(f"{jobs} at once share the device: how much sooner they are done is not measured")
    for (network, data, mined, kind), speed in estimator.known.items():
        what = f"{network} on {data}{', BulletTrain' if mined else ''}{f', {kind}' if kind else ''}"
        lines.append(f"{what}: {speed.passes:,.0f} passes a second, from {speed.source}")
    lines.append("training: counted passes at the paper's shares, without compilation; judging: a rough guess")
    say(console, "\n".join(lines))
