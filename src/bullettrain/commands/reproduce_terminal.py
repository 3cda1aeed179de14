"""What `bullettrain reproduce` says on a terminal: what there is, what would run, and what came out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bullettrain.reproduction import tables
from bullettrain.reproduction.estimate import Estimator
from bullettrain.reproduction.results import OPEN, Results, Verdict
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
KINDS = {"first_layer": "YOPO", "align": "GradAlign", "carry": "Free"}
MANY = 30
"""Rows of which only those that were run are listed."""


def show_list(console: Console) -> None:
    """All that can be reproduced, and the scales."""
    say_rows(console, [(Text(study.name, "bold"), study.title) for study in STUDIES.values()])
    console.print()
    say_rows(console, [(Text.assemble("--scale ", (scale.name, "bold")), scale.about) for scale in SCALES.values()])


def show(console: Console, results: Results) -> None:
    """The table with as much as there is room for, what is to be said of rows, and the claims."""
    for look in _looks(results):
        table = _table(results, look)
        if fits(console, table):
            break
    console.print(table)
    if not (look.paper and look.titles):
        said = "to base: points against its baseline; the files have more columns, and whole names"
        console.print(said, style="dim")
    statuses: dict[str, list[str]] = {}
    for row in results.rows.values():
        if (status := results.status(row)) and (status != OPEN or len(results.rows) <= MANY):
            statuses.setdefault(status, []).append(row.title if look.titles else row.name)
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
        near = " (near enough)" if tables.allowed(verdict, judged) else ""
        table.add_row(Text(f"{tables.MARKS[verdict]} {verdict.value}", STYLES[verdict]), claim.text + near)
    console.print(table)


@dataclass(frozen=True)
class _Look:
    """How much of the table is shown."""

    columns: Sequence[tables.Column]
    paper: bool = False
    titles: bool = False


def _looks(results: Results) -> Iterator[_Look]:
    """From everything down to what matters most."""
    columns = tables.columns(results)
    yield _Look(columns, paper=True, titles=True)
    for kept in range(len(columns), 1, -1):
        yield _Look(columns[:kept], paper=True)
    for kept in range(len(columns), 0, -1):
        yield _Look(columns[:kept])


def _table(results: Results, look: _Look) -> Table:
    table = Table(title=results.study.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in look.columns:
        table.add_column(SHORT.get(column.metric, column.heading), justify="right", no_wrap=True)
        if column.paper and look.paper:
            table.add_column("paper", justify="right", style="dim", no_wrap=True)
        if column.baseline:
            table.add_column("to base", justify="right", no_wrap=True)
    for row in results.rows.values():
        run = bool(results.runs[row.name])
        if len(results.rows) > MANY and not run:
            continue
        cells: list[str | Text] = []
        for column in look.columns:
            cells.append(_coloured(tables.ours(results, row, column.metric, beside=column.baseline)))
            cells += [tables.paper(row, column.metric)] if column.paper and look.paper else []
            gained = tables.gain(results, row, column.metric, paper=look.paper)
            cells += [_coloured(gained)] if column.baseline else []
        table.add_row(row.title if look.titles else row.name, *cells, style=None if run else "dim")
    return table


def _coloured(cell: tables.Cell) -> str | Text:
    if cell.verdict in (None, Verdict.OPEN):
        return cell.text
    return Text(f"{cell.text} {tables.MARKS[cell.verdict]}", STYLES[cell.verdict])


def _state(task: Task) -> str:
    """How far it is."""
    if task.done or task.without_weights:
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
        if not (task.done or task.without_weights):
            training, judging = estimator.seconds(task)
            times = [duration(training), duration(judging)]
            total += training + judging
        table.add_row(task.label, state, *times)
    console.print(table)
    lines = [f"altogether about {duration(total)}, one run after another"]
    if jobs > 1:
        lines.append(f"{jobs} at once share the device: how much sooner they are done is not measured")
    for (network, data, mined, kind), speed in estimator.known.items():
        what = f"{network} on {data}{', BulletTrain' if mined else ''}{f', {KINDS[kind]}' if kind else ''}"
        lines.append(f"{what}: {speed.passes:,.0f} passes a second, from {speed.source}")
    lines.append("training: counted passes at the paper's shares, without compilation; judging: a rough guess")
    say(console, "\n".join(lines))
