"""`bullettrain train`: one command to a robust model."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from bullettrain import formatting, processes
from bullettrain.brief import first_line
from bullettrain.cli.commands import Train
from bullettrain.cli.options import check_apart
from bullettrain.config import RECIPES, Config
from bullettrain.config.describe import as_yaml
from bullettrain.config.methods import METHODS, with_method
from bullettrain.config.methods import one_line as method_line
from bullettrain.config.recipes import one_line
from bullettrain.formatting import attack_name
from bullettrain.processes import Place
from bullettrain.reporting import write_report
from bullettrain.reporting.paper import paper_boundary
from bullettrain.run_folder import SHARES, RunError, RunFolder
from bullettrain.terminal import duration, logged, percent, say, say_interrupted, say_rows, show_table, terminal
from bullettrain.training.collapse import CollapseError
from bullettrain.training.minutes import for_minutes
from bullettrain.training.recipe_files import find_recipe
from bullettrain.training.run import Result, check_folder, compare, comparison, resume_command
from bullettrain.training.run import train as run_training
from bullettrain.training.setup import load_data

DROPPED = ("outlier", "robust", "boundary", "passes", "training")
"""Columns of a comparison that a narrow terminal does without, first one first."""


def train(options: Train) -> None:
    """Run the command."""
    began, console = time.monotonic(), terminal()
    if options.list_:
        show_list(console)
        return
    config = _config(options)
    if options.show:
        print(as_yaml(config), end="")
        return
    folder = _folder(options, config)
    if options.resume and not folder.is_dir():
        raise RunError(f"{folder} is not there, so there is nothing to resume; check --out, or leave out --resume")
    if options.cache_dir is not None:
        cache_compiled_code(options.cache_dir)
    again = ["--device", options.device] if options.device else []
    again += ["--cache-dir", str(options.cache_dir)] if options.cache_dir else []
    again += ["--compare"] * options.compare + ["--keep-going"] * options.keep_going
    place: Place | None = None
    try:
        place = processes.find_place(options.device)
        with logged(console):
            if options.minutes is not None:
                check_folder(RunFolder(folder), config, resume=False, data_dir=options.data_dir)
                config = for_minutes(config, options.minutes, place, load_data(config, options.data_dir), began=began)
            _run(console, options, config, folder, place, again)
    except KeyboardInterrupt:  # before it trains, or a second one: at once, with what was saved before
        if place is not None and not place.first:
            raise
        if any(RunFolder(path).exists for path in (folder, folder / "baseline")):
            say_interrupted(console, resume_command(config, folder, options.data_dir, again), "go on with")
        say(console, "interrupted before the first step; nothing was saved")
        raise
    processes.leave_group()  # nobody leaves while the first one still writes


def _config(options: Train) -> Config:
    """What is to be trained: the recipe, and what the options change in it."""
    check_apart(method=options.method, baseline=options.baseline, compare=options.compare)
    for other in ("epochs", "resume", "compare"):
        check_apart(minutes=options.minutes, **{other: getattr(options, other)})
    changes: dict[str, object] = {"network.name": options.network, "data.name": options.data}
    changes |= {"method.eps": options.eps, "optimizer.lr": options.lr, "training.compile": options.compile_ or None}
    changes |= {f"training.{key}": getattr(options, key) for key in ("epochs", "batch_size", "seed", "accumulate")}
    settings = [*(options.settings or ()), *(f"{key}={value}" for key, value in changes.items() if value is not None)]
    named = [setting.partition("=")[2].strip() for setting in settings if setting.startswith("network.name=")]
    config = find_recipe(options.recipe, network=named[-1] if named else None, trust=options.trust)
    config = (with_method(config, options.method) if options.method else config).with_settings(settings)
    return config.baseline() if options.baseline else config


def _folder(options: Train, config: Config) -> Path:
    """Of the run: as it is asked for, or runs/NAME, or runs/NAME-2, … past finished ones and those of other settings.

    The newest unfinished one of these settings comes first; to resume, where there is none, any newest unfinished.
    """
    if options.out is not None:
        return options.out
    if options.resume and RunFolder(Path(options.recipe)).exists:
        return Path(options.recipe)
    kind = options.method or ("compare" if options.compare else "baseline" if options.baseline else "")
    name = "-".join(filter(None, (re.sub(r"\.ya?ml$", "", Path(options.recipe).resolve().name), kind)))
    parts = {"baseline": config.baseline(), "bullettrain": config} if options.compare else {"": config}
    there = []
    free = Path("runs") / name
    while any(RunFolder(free / part).exists for part in parts):
        there.append(free)
        free = Path("runs") / f"{name}-{len(there) + 1}"
    unfinished = [path for path in there if not all(RunFolder(path / part).finished for part in parts)]
    same = [path for path in unfinished if _is_of(path, parts)]
    return ((same or unfinished or there or [free]) if options.resume else (same or [free]))[-1]


def _is_of(path: Path, parts: Mapping[str, Config]) -> bool:
    """Whether the runs in a folder, as far as there are any, have these configurations."""
    there = {part: RunFolder(path / part) for part in parts if RunFolder(path / part).exists}
    try:
        return not any(folder.config().differences(parts[part]) for part, folder in there.items())
    except RunError:  # a config.yaml that cannot be read is none of ours
        return False


def _run(console: Console, options: Train, config: Config, folder: Path, place: Place, again: Sequence[str]) -> None:
    """Train one run, or both of a comparison, write the report, and say what came of it.

    Args:
        console, options, config, folder, place: of the run.
        again: options of the command that goes on.
    """
    how: dict[str, Any] = {"console": console if place.first else None, "data_dir": options.data_dir}
    how |= {"resume": options.resume, "keep_going": options.keep_going}
    parts = [folder / "baseline", folder / "bullettrain", folder] if options.compare else [folder]
    results: Sequence[Result]
    try:
        if options.compare:
            results = compare(config, folder, place, **how)
        else:
            results = [run_training(config, folder, place, **how)]
    except CollapseError as error:
        if place.first:
            _write_reports(console, parts)
            kept = [path for path in parts if RunFolder(path).has_checkpoint()]
            where = f"What was saved before is in {kept[-1]}; evaluate it before you use it." if kept else ""
            command = resume_command(config, folder, options.data_dir, [*again, "--keep-going"])
            advice = "" if options.keep_going else f" To go on all the same:\n  {command}"
            say(console, Text.assemble(("stopped:", "bold red"), f" {error}"))
            console.print(f"{where or 'No epoch was finished before.'}{advice}", soft_wrap=True)
        sys.exit(1)
    if not place.first:
        return
    _write_reports(console, parts)
    if (signal := results[-1].signal) is not None:
        say_interrupted(console, resume_command(config, folder, options.data_dir, again), "go on with", signal)
    if options.compare:
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


def show_list(console: Console) -> None:
    """The recipes and methods, a line each."""
    recipes = [(Text(name, "bold"), one_line(name)) for name in RECIPES]
    say_rows(console, recipes + [(Text.assemble("--method ", (name, "bold")), method_line(name)) for name in METHODS])


def print_result(console: Console, result: Result) -> None:
    """The figures of a run."""
    attacks = list(next(iter(result.accuracy.values())))
    rows = [[weights, *(percent(found[name]) for name in attacks)] for weights, found in result.accuracy.items()]
    end = result.end
    captured = formatting.captures(end.get("capture_seconds", 0.0), " and {} of compiling and capturing")
    lines = [f"trained {duration(end['seconds'])}{formatting.plain(captured)}, {end['work']:.1f} passes an example"]
    if end["boundary"] < 1:
        shares = [f"{name} {percent(end[name])}" for name in SHARES]
        lines.append(", ".join(shares) + _beside_paper(result))
        theoretical = formatting.times(end["theoretical_speedup"])
        lines.append(f"speed-up {theoretical} theoretical, {end['work_speedup']:.2f}× counted work")
    console.print(f"{result.folder}", style="bold", soft_wrap=True)
    show_table(console, ["weights", *map(attack_name, attacks)], rows)
    say(console, "\n".join(lines))


def print_comparison(console: Console, baseline: Result, mined: Result) -> None:
    """The figures of two runs, side by side."""
    figures = comparison(baseline, mined)
    speedup, errors, (plain, own) = figures["speedup"], figures["errors"], figures["rows"]
    attacks = [key for key in plain if key in errors]
    rows = []
    for title, row in (("baseline", plain), ("BulletTrain", own)):
        shares = [percent(row[name]) if row["boundary"] < 1 else "–" for name in SHARES]
        cells = [percent(row[attack]) for attack in attacks]
        rows.append([title, *cells, duration(row["seconds"]), f"{row['work']:.1f}", *shares])
    says = []
    for name in attacks:
        gap, error = own[name] - plain[name], errors[name]["error"]
        says.append(f"{attack_name(name)} {formatting.points(gap, error=error)}{formatting.too_close(gap, error)}")
    console.print(f"{mined.folder.parent}", style="bold", soft_wrap=True)
    if not show_table(console, ["", *map(attack_name, attacks), "training", "passes", *SHARES], rows, dropped=DROPPED):
        say(console, "the report has more columns", style="dim")
    lines = [
        f"speed-up {formatting.times(speedup['theoretical'])} theoretical, {speedup['work']:.2f}× counted work, "
        f"{speedup['wall_clock']:.2f}× wall-clock{_beside_paper(mined)}",
        formatting.plain(formatting.in_all(own, plain)),
        f"accuracy of the {plain['weights']} weights; against the baseline {', '.join(says)}",
        formatting.error_in_words(errors[attacks[-1]]["paired"]),
    ]
    say(console, "\n".join(line for line in lines if line))


def _beside_paper(result: Result) -> str:
    """F_B of the paper, where it has the recipe's."""
    paper = paper_boundary(RunFolder(result.folder).config().recipe)
    return "" if paper is None else f"; in the paper boundary {formatting.plain(formatting.percent(paper, 0))}"


def cache_compiled_code(folder: Path) -> None:
    """Have PyTorch keep compiled code in ``folder``; before anything is compiled."""
    for variable, part in {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}.items():
        os.environ[variable] = str(folder.expanduser().resolve() / part)
