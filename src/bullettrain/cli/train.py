"""`bullettrain train`: train a robust network."""

from __future__ import annotations

import os
import re
import shlex
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
from bullettrain.config import RECIPES, Config, ConfigError
from bullettrain.config.describe import as_yaml
from bullettrain.config.methods import METHODS, with_method
from bullettrain.config.methods import one_line as method_line
from bullettrain.config.methods import title as objective_title
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
from bullettrain.training.run import RunResult, check_folder, compare, comparison, resume_command
from bullettrain.training.run import train as run_training
from bullettrain.training.setup import load_data

DROPPED = ("outlier", "robust", "boundary", "passes", "training")
"""Columns of a comparison that a narrow terminal leaves out, in this order."""


def train(options: Train) -> None:
    """Run `bullettrain train`."""
    began, console = time.monotonic(), terminal()
    if options.list_:
        show_list(console)
        return
    config = _config(options)
    if options.recipe is None and re.match("folder:.", config.data.name):
        command = shlex.join(["bullettrain", "train", "own-images", "--data", config.data.name])
        raise ConfigError(f"for your own images run `{command}`; without a recipe the settings are for the digits")
    if options.show:
        print(as_yaml(config), end="")
        return
    folder = _folder(options, config)
    if options.resume and not folder.is_dir():
        raise RunError(f"{folder} is not there, so there is nothing to resume; check --out, or leave out --resume")
    if options.cache_dir is not None:
        cache_compiled_code(options.cache_dir)
    place: Place | None = None
    try:
        place = processes.find_place(options.device)
        with logged(console):
            if place.first and RunFolder(Path(_recipe(options))).exists and not RunFolder(folder).exists:
                say(console, f"{options.recipe} is a run: its settings are trained anew, in {folder}")
            if options.minutes is not None:
                check_folder(RunFolder(folder), config, resume=False, data_dir=options.data_dir)
                config = for_minutes(config, options.minutes, place, load_data(config, options.data_dir), began=began)
            _run(console, options, config, folder, place)
    except KeyboardInterrupt:  # before training, or a second Ctrl-C
        if place is not None and not place.first:
            raise
        if any(RunFolder(path).exists for path in (folder, folder / "baseline")):
            say_interrupted(console, _resume_command(options, config, folder))
        say(console, "interrupted before the first step; nothing was saved")
        raise
    processes.leave_group()  # all processes wait until the first has written its files


def _config(options: Train) -> Config:
    """Return the recipe with the changes of the options."""
    check_apart(method=options.method, baseline=options.baseline, compare=options.compare)
    for other in ("epochs", "resume", "compare"):
        check_apart(minutes=options.minutes, **{other: getattr(options, other)})
    changes: dict[str, object] = {"network.name": options.network, "data.name": options.data}
    changes |= {"method.eps": options.eps, "optimizer.lr": options.lr, "training.compile": options.compile_ or None}
    changes |= {f"training.{key}": getattr(options, key) for key in ("epochs", "batch_size", "seed", "accumulate")}
    settings = [*(options.settings or ()), *(f"{key}={value}" for key, value in changes.items() if value is not None)]
    networks = [setting.partition("=")[2].strip() for setting in settings if setting.startswith("network.name=")]
    config = find_recipe(_recipe(options), network=networks[-1] if networks else None, trust=options.trust)
    config = (with_method(config, options.method) if options.method else config).with_settings(settings)
    if options.compare and config == config.baseline():
        raise ConfigError("this recipe is its own baseline, with the same steps for all examples: leave out --compare")
    return config.baseline() if options.baseline else config


def _recipe(options: Train) -> str:
    return "digits" if options.recipe is None else options.recipe


def _folder(options: Train, config: Config) -> Path:
    """Return the folder of the run: --out, or the first free one of runs/NAME, runs/NAME-2, …

    The newest unfinished run with the same settings comes first. With --resume, any newest unfinished run will do.
    """
    if options.out is not None:
        return options.out
    recipe = Path(_recipe(options))
    if options.resume and RunFolder(recipe).exists:
        return recipe
    kind = options.method or ("compare" if options.compare else "baseline" if options.baseline else "")
    name = "-".join(filter(None, (re.sub(r"\.ya?ml$", "", recipe.resolve().name), kind)))
    parts = {"baseline": config.baseline(), "bullettrain": config} if options.compare else {"": config}
    existing = []
    free = Path("runs") / name
    while any(RunFolder(free / part).exists for part in parts):
        existing.append(free)
        free = Path("runs") / f"{name}-{len(existing) + 1}"
    unfinished = [path for path in existing if not all(RunFolder(path / part).finished for part in parts)]
    same = [path for path in unfinished if _has_settings(path, parts)]
    return ((same or unfinished or existing or [free]) if options.resume else (same or [free]))[-1]


def _has_settings(path: Path, parts: Mapping[str, Config]) -> bool:
    """Return whether the runs in a folder have these configurations."""
    folders = {part: RunFolder(path / part) for part in parts if RunFolder(path / part).exists}
    try:
        return not any(folder.config().differences(parts[part]) for part, folder in folders.items())
    except RunError:  # config.yaml cannot be read
        return False


def _resume_command(options: Train, config: Config, folder: Path, *others: str) -> str:
    """Return the command that resumes the run, with ``others`` of its options."""
    words = ["--device", options.device] if options.device else []
    words += ["--cache-dir", str(options.cache_dir)] if options.cache_dir else []
    words += ["--compare"] * options.compare + ["--keep-going"] * options.keep_going
    return resume_command(config, folder, options.data_dir, [*words, *others])


def _run(console: Console, options: Train, config: Config, folder: Path, place: Place) -> None:
    """Train one run, or both runs of a comparison, write the report and print the results."""
    kwargs: dict[str, Any] = {"console": console if place.first else None, "data_dir": options.data_dir}
    kwargs |= {"resume": options.resume, "keep_going": options.keep_going}
    parts = [folder / "baseline", folder / "bullettrain", folder] if options.compare else [folder]
    results: Sequence[RunResult]
    try:
        if options.compare:
            results = compare(config, folder, place, **kwargs)
        else:
            results = [run_training(config, folder, place, **kwargs)]
    except CollapseError as error:
        if place.first:
            _write_reports(console, parts)
            saved = [path for path in parts if RunFolder(path).has_checkpoint()]
            text = "No epoch was finished before."
            if saved:
                text = f"The last checkpoint is in {saved[-1]}; evaluate it before you use it."
            if not options.keep_going:
                text += f" To continue anyway:\n  {_resume_command(options, config, folder, '--keep-going')}"
            say(console, Text.assemble(("stopped:", "bold red"), f" {error}"))
            console.print(text, soft_wrap=True)
        sys.exit(1)
    if not place.first:
        return
    _write_reports(console, parts)
    if (signal := results[-1].signal) is not None:
        say_interrupted(console, _resume_command(options, config, folder), signal=signal)
    if options.compare:
        print_comparison(console, *results)
    else:
        print_result(console, results[-1])
    console.print(f"report  {folder / 'report.html'}", soft_wrap=True)


def _write_reports(console: Console, folders: Sequence[Path]) -> None:
    """Write the reports, also of a run that collapsed or was stopped. A failure is only printed."""
    for folder in folders:
        if not (RunFolder(folder).exists or (folder / "comparison.json").is_file()):
            continue
        try:
            write_report(folder)
        except (OSError, RunError) as error:
            console.print(f"report.html could not be written to {folder}: {first_line(error)}", soft_wrap=True)


def show_list(console: Console) -> None:
    """Print the recipes and methods."""
    recipes = [(Text(name, "bold"), one_line(name)) for name in RECIPES]
    say_rows(console, recipes + [(Text.assemble("--method ", (name, "bold")), method_line(name)) for name in METHODS])


def print_result(console: Console, result: RunResult) -> None:
    """Print the results of a run."""
    attacks = list(next(iter(result.accuracy.values())))
    rows = [
        [f"{weights} (default)" if weights == result.chosen else weights, *(percent(shares[name]) for name in attacks)]
        for weights, shares in result.accuracy.items()
    ]
    end = result.end
    captured = formatting.captures(end.get("capture_seconds", 0.0), " and {} of compiling and capturing")
    lines = [f"trained {duration(end['seconds'])}{formatting.plain(captured)}, {end['work']:.1f} passes an example"]
    if end["boundary"] < 1:
        lines.append(", ".join(f"{name} {percent(end[name])}" for name in SHARES) + _paper_boundary(result))
        method, ratio = RunFolder(result.folder).config().method, end["work_speedup"]
        paper = formatting.times(end["theoretical_speedup"])
        steps = f"{method.boundary} {formatting.plural('step', method.boundary)}"
        full = f"{objective_title(method.objective)} with {steps} for all"
        less = f"{max(ratio, 1 / ratio):.2f}× {'less' if ratio >= 1 else 'more'} work"
        lines.append(f"{less} than {full} (the paper's formula: {paper}); --compare times both")
    console.print(f"{result.folder}", style="bold", soft_wrap=True)
    show_table(console, ["weights", *map(attack_name, attacks)], rows)
    say(console, "\n".join(lines))


def print_comparison(console: Console, baseline: RunResult, mined: RunResult) -> None:
    """Print the results of two runs side by side."""
    figures = comparison(baseline, mined)
    speedup, errors, (plain, own) = figures["speedup"], figures["errors"], figures["rows"]
    attacks = [key for key in plain if key in errors]
    rows = []
    for title, row in (("baseline", plain), ("BulletTrain", own)):
        shares = [percent(row[name]) if row["boundary"] < 1 else "–" for name in SHARES]
        cells = [percent(row[attack]) for attack in attacks]
        rows.append([title, *cells, duration(row["seconds"]), f"{row['work']:.1f}", *shares])
    differences = []
    for name in attacks:
        gap, error = own[name] - plain[name], errors[name]["error"]
        text = formatting.points(gap, error=error) + formatting.too_close(gap, error)
        differences.append(f"{attack_name(name)} {text}")
    console.print(f"{mined.folder.parent}", style="bold", soft_wrap=True)
    if not show_table(console, ["", *map(attack_name, attacks), "training", "passes", *SHARES], rows, dropped=DROPPED):
        say(console, "the report has more columns", style="dim")
    lines = [
        f"speed-up {formatting.times(speedup['theoretical'])} theoretical, {speedup['work']:.2f}× counted work, "
        f"{speedup['wall_clock']:.2f}× wall-clock{_paper_boundary(mined)}",
        formatting.plain(formatting.in_all(own, plain)),
        f"accuracy of the {plain['weights']} weights; against the baseline {', '.join(differences)}",
        formatting.error_in_words(errors[attacks[-1]]["paired"]),
    ]
    say(console, "\n".join(line for line in lines if line))


def _paper_boundary(result: RunResult) -> str:
    """Return the paper's share of boundary examples, if it has one for the recipe."""
    paper = paper_boundary(RunFolder(result.folder).config().recipe)
    return "" if paper is None else f"; in the paper boundary {formatting.plain(formatting.percent(paper, 0))}"


def cache_compiled_code(folder: Path) -> None:
    """Let PyTorch cache compiled code in ``folder``. Call it before anything is compiled."""
    for variable, part in {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}.items():
        os.environ[variable] = str(folder.expanduser().resolve() / part)
