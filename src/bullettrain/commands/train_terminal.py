"""What `bullettrain train` says: the recipes, how a run went, and how to go on."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bullettrain import formatting
from bullettrain.brief import first_line
from bullettrain.config import RECIPES, Config
from bullettrain.config.methods import METHODS
from bullettrain.config.methods import one_line as method_line
from bullettrain.config.recipes import one_line
from bullettrain.processes import Place
from bullettrain.reporting import write_report
from bullettrain.reporting.paper import paper_boundary
from bullettrain.run_folder import SHARES, RunError, RunFolder
from bullettrain.terminal import duration, fitting, percent, say, say_rows
from bullettrain.training.collapse import CollapseError
from bullettrain.training.minutes import for_minutes
from bullettrain.training.run import Result, check_folder, compare, comparison, resume_command
from bullettrain.training.run import train as run_training
from bullettrain.training.setup import load_data

DROPPED = ("outlier", "robust", "boundary", "passes", "training")
"""Columns of a comparison that a narrow terminal does without, first one first."""


def fit_minutes(
    config: Config, minutes: float, place: Place, data_dir: Path | None, folder: Path, *, began: float
) -> Config:
    """The config with the epochs that fit into ``minutes``, counted from ``began``; the folder is looked at first."""
    check_folder(RunFolder(folder), config, resume=False, data_dir=data_dir)
    return for_minutes(config, minutes, place, load_data(config, data_dir), began=began)


def run(
    console: Console,
    config: Config,
    folder: Path,
    place: Place,
    options: Mapping[str, Any],
    *,
    both: bool,
    again: Sequence[str],
) -> None:
    """Train one run, or both of a comparison, write the report, and say what came of it.

    Args:
        console, config, folder, place: of the run.
        options: of :func:`bullettrain.training.run.train`.
        both: a comparison.
        again: options of the command that goes on.
    """
    shown = console if place.first else None
    parts = [folder / "baseline", folder / "bullettrain", folder] if both else [folder]
    try:
        if both:
            results = [*compare(config, folder, place, console=shown, **options)]
        else:
            results = [run_training(config, folder, place, console=shown, **options)]
    except CollapseError as error:
        if place.first:
            _write_reports(console, parts)
            kept = [path for path in parts if RunFolder(path).has_checkpoint()]
            where = f"What was saved before is in {kept[-1]}; evaluate it before you use it." if kept else ""
            command = resume_command(config, folder, options["data_dir"], [*again, "--keep-going"])
            advice = "" if options["keep_going"] else f" To go on all the same:\n  {command}"
            say(console, Text.assemble(("stopped:", "bold red"), f" {error}"))
            console.print(f"{where or 'No epoch was finished before.'}{advice}", soft_wrap=True)
        sys.exit(1)
    if not place.first:
        return
    _write_reports(console, parts)
    if (signal := results[-1].signal) is not None:
        say_how_to_go_on(console, resume_command(config, folder, options["data_dir"], again))
        sys.exit(128 + signal)
    if both:
        print_comparison(console, *results)
    else:
        print_result(console, results[-1])
    console.print(f"report  {folder / 'report.html'}", soft_wrap=True)


def _write_reports(console: Console, folders: Sequence[Path]) -> None:
    """The reports, also of a run that collapsed or was stopped; a disk without room for them loses nothing else."""
    for folder in folders:
        if not (RunFolder(folder).exists or (folder / "comparison.json").is_file()):
            continue
        try:
            write_report(folder)
        except (OSError, RunError) as error:
            console.print(f"report.html could not be written to {folder}: {first_line(error)}", soft_wrap=True)


def say_how_to_go_on(console: Console, command: str) -> None:
    """After an interruption."""
    console.print(f"interrupted; go on with:\n  {command}", soft_wrap=True)


def default_folder(name: str, parts: Mapping[str, Config], *, resume: bool) -> Path:
    """runs/NAME, or runs/NAME-2, … past the finished ones and those of another configuration.

    The newest unfinished one of this configuration comes first; to resume, where there is none, any newest unfinished.
    ``parts`` are the runs in the folder, by their folder in it.
    """
    candidates = [Path("runs") / name]
    while any(RunFolder(candidates[-1] / part).exists for part in parts):
        candidates.append(Path("runs") / f"{name}-{len(candidates) + 1}")
    free = candidates.pop()
    unfinished = [path for path in candidates if not all(RunFolder(path / part).finished for part in parts)]
    same = [path for path in unfinished if _is_of(path, parts)]
    if same or not resume:
        return (same or [free])[-1]
    return (unfinished or candidates or [free])[-1]


def _is_of(path: Path, parts: Mapping[str, Config]) -> bool:
    """Whether the runs in a folder, as far as there are any, have these configurations."""
    there = {part: RunFolder(path / part) for part in parts if RunFolder(path / part).exists}
    try:
        return not any(folder.config().differences(parts[part]) for part, folder in there.items())
    except RunError:  # a config.yaml that cannot be read is none of ours
        return False


def show_list(console: Console) -> None:
    """The recipes and methods, a line each."""
    recipes = [(Text(name, "bold"), one_line(name)) for name in RECIPES]
    say_rows(console, recipes + [(Text.assemble("--method ", (name, "bold")), method_line(name)) for name in METHODS])


def print_result(console: Console, result: Result) -> None:
    """The figures of a run."""
    table = Table(box=None, pad_edge=False)
    attacks = list(next(iter(result.accuracy.values())))
    for heading in ("weights", *(_heading(attack) for attack in attacks)):
        table.add_column(heading, justify="left" if heading == "weights" else "right", no_wrap=True)
    for weights, figures in result.accuracy.items():
        table.add_row(weights, *(percent(figures[attack]) for attack in attacks))
    end = result.end
    besides = formatting.plain(
        formatting.captures(end.get("capture_seconds", 0.0), " and {} of compiling and capturing")
    )
    lines = [f"trained {duration(end['seconds'])}{besides}, {end['work']:.1f} passes an example"]
    if end["boundary"] < 1:
        shares = [f"{name} {percent(end[name])}" for name in SHARES]
        lines.append(", ".join(shares) + _beside_paper(result))
        theoretical = formatting.times(end["theoretical_speedup"])
        lines.append(f"speed-up {theoretical} theoretical, {end['work_speedup']:.2f}× counted work")
    console.print(f"{result.folder}", style="bold", soft_wrap=True)
    console.print(table)
    say(console, "\n".join(lines))


def print_comparison(console: Console, baseline: Result, mined: Result) -> None:
    """The figures of two runs, side by side."""
    figures = comparison(baseline, mined)
    attack = next(key for key in figures["rows"][0] if key not in ("name", "weights", "clean"))
    rows = []
    for row in figures["rows"]:
        cells = {"": "BulletTrain" if row["name"] == "bullettrain" else "baseline"}
        cells |= {_heading(key): percent(row[key]) for key in ("clean", attack)}
        cells |= {"training": duration(row["seconds"]), "passes": f"{row['work']:.1f}"}
        cells |= {name: percent(row[name]) if row["boundary"] < 1 else "–" for name in SHARES}
        rows.append(cells)
    table = fitting(console, partial(_table, rows), list(rows[0]), DROPPED)
    speedup, errors = figures["speedup"], figures["errors"]
    plain, own = figures["rows"]
    changes = [(name, own[name] - plain[name], errors[name]["error"]) for name in ("clean", attack)]
    says = [
        f"{_heading(name)} {formatting.points(gap, error=error)}{formatting.too_close(gap, error)}"
        for name, gap, error in changes
    ]
    console.print(f"{mined.folder.parent}", style="bold", soft_wrap=True)
    console.print(table)
    if len(table.columns) < len(rows[0]):
        say(console, "the report has more columns", style="dim")
    lines = [
        f"speed-up {formatting.times(speedup['theoretical'])} theoretical, {speedup['work']:.2f}× counted work, "
        f"{speedup['wall_clock']:.2f}× wall-clock{_beside_paper(mined)}",
        formatting.plain(formatting.in_all(own, plain)),
        f"accuracy of the {plain['weights']} weights; against the baseline {', '.join(says)}",
        formatting.error_in_words(errors[attack]["paired"]),
    ]
    say(console, "\n".join(line for line in lines if line))


def _table(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in columns:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for cells in rows:
        table.add_row(*(cells[heading] for heading in columns))
    return table


def _beside_paper(result: Result) -> str:
    """F_B of the paper, where it has the recipe's."""
    paper = paper_boundary(RunFolder(result.folder).config().recipe)
    return "" if paper is None else f"; in the paper boundary {formatting.plain(formatting.percent(paper, 0))}"


def _heading(attack: str) -> str:
    return attack if attack == "clean" else formatting.attack_name(attack)
