"""`bullettrain reproduce`: a table or a figure of the paper, from real runs, beside the paper's own."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import typing
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.text import Text

from bullettrain.terminal import say, terminal

if TYPE_CHECKING:
    from bullettrain.reproduction.pace import How
    from bullettrain.reproduction.records import Record
    from bullettrain.reproduction.results import Results
    from bullettrain.reproduction.rows import Outcome, Task
    from bullettrain.reproduction.scales import Scale
    from bullettrain.reproduction.study import Row, Study
    from bullettrain.training.config import Config
    from bullettrain.training.setup import Place


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="What to reproduce; without any, what there is.")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke, short, paper: digits in seconds, minutes on a GPU, all of it.")
    ] = "smoke",
    out: Annotated[
        Path | None, typer.Option(help="Folder of runs, records and tables. Default: runs/reproduce/SCALE.")
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            "--rows", metavar="ROW", help="Run these alone, with commas between them; * stands for any letters."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Run every row so often; tables then have mean ± std.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once on the device; their seconds then say nothing.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every row; again for more."),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(min=0, help="Test images for attacks that training does not end with anyway; 0: all."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="What those attacks search in: float32, tf32 or bf16. Tables say where it is not float32. Default: "
            "what is there will do, float32 for the rest."
        ),
    ] = None,
    train_only: Annotated[
        bool,
        typer.Option(
            "--train-only", help="Leave those attacks for later: for `bullettrain evaluate`, or this without it."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run and how long it would take, and stop.")
    ] = False,
    only_tables: Annotated[
        bool,
        typer.Option(
            "--tables",
            help="Train nothing; write tables and pictures of what is there, also of what `evaluate` found since.",
        ),
    ] = False,
    pace: Annotated[
        bool,
        typer.Option(
            "--pace",
            help="Train nothing; time the steps of the finished runs one after the other, with nothing else on the "
            "device: minutes and wall-clock of runs that shared it. --jobs: compiled at once.",
        ),
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where datasets lie. Default: $BULLETTRAIN_DATA, then the user's cache.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: a GPU where there is one.")] = None,
) -> None:
    """Reproduce a table or a figure of the paper, with its own figures beside ours.

    Rows are recipes with settings. Runs that are finished are kept and reused, also by other tables; the same
    command again goes on where it was stopped. Of several names, runs that they share are made once.

    Examples:

      bullettrain reproduce

      bullettrain reproduce table-trades --scale smoke

      bullettrain reproduce table-trades --scale short --rows trades,bt-nr2 --seeds 3 --dry-run

      bullettrain reproduce fig-gamma fig-nr --scale short --jobs 3
    """
    from bullettrain.checks import instead
    from bullettrain.commands.reproduce_terminal import forecast, show, show_list
    from bullettrain.data.base import root
    from bullettrain.precision import Precision
    from bullettrain.reproduction.estimate import Estimator
    from bullettrain.reproduction.pace import How
    from bullettrain.reproduction.records import read_records
    from bullettrain.reproduction.results import Results
    from bullettrain.reproduction.rows import FOLDERS, RECORDS, Task, merged, take_up
    from bullettrain.reproduction.scales import find_scale
    from bullettrain.reproduction.studies import find_study
    from bullettrain.training.settings import ConfigError
    from bullettrain.training.setup import find_place

    console = terminal()
    if not names:
        show_list(console)
        return
    studies, size_of = [find_study(name) for name in dict.fromkeys(names)], find_scale(scale)
    patterns = [part for text in rows or [] for part in text.split(",") if part]
    if rows and not patterns:
        raise ConfigError("--rows names no row; leave it away for all of them")
    if patterns and len(studies) > 1:
        raise ConfigError(f"--rows {','.join(patterns)} goes with one name; there are {len(studies)}")
    place = find_place(device)
    if place.together:
        raise ConfigError("reproduce starts its own processes (--jobs); start it without torchrun")
    out = out or Path("runs") / "reproduce" / scale
    if out.is_file():
        raise ConfigError(f"--out {out} is a file; give a folder")
    changed = tuple(settings or ())
    if precision is not None and precision not in typing.get_args(Precision):
        raise ConfigError(f"--precision is {precision!r}{instead(precision, typing.get_args(Precision))}")
    if train_only and only_tables:
        raise ConfigError("--train-only trains and --tables does not; give one of them")
    if pace and (train_only or only_tables or dry_run):
        raise ConfigError("--pace goes without --train-only, --tables and --dry-run")

    def task(study: Study, row: Row, seed: int) -> Task:
        config = _config(row, size_of, changed, seed, place)
        return Task(
            config,
            out,
            attacks=() if train_only else tuple(size_of.attack(attack) for attack in study.attacks),
            ranks=study.ranks and not row.plain and not train_only,
            size=size_of.size if size is None else size,
            precision=cast(Precision | None, precision),
            corruptions=root(data_dir) / FOLDERS[config.data.name] if config.data.name in FOLDERS else None,
            data_dir=data_dir,
            device=device,
            report=size_of.report,
            label=row.name if seed == 0 else f"{row.name}, seed {seed}",
        )

    tasks = merged(
        [
            task(study, row, seed)
            for seed in range(seeds)
            for study in studies
            for row in study.chosen(size_of, patterns)
        ]
    )
    records = read_records(out / RECORDS)  # one that is damaged is better found now than after all is trained
    if dry_run:
        title = f"{', '.join(study.name for study in studies)}, scale {scale}"
        forecast(console, title, tasks, Estimator(place, records), jobs)
        return
    written = []
    try:
        if pace or only_tables:
            _make_folders(out)
        if pace:
            signal, problems = None, _time(console, tasks, How(at_once=jobs, data_dir=data_dir, device=device))
        elif only_tables:
            signal, problems = None, [f"{one.name}: {one.problem}" for one in map(take_up, tasks) if one.problem]
        else:
            signal, problems = _run(console, tasks, jobs)
        records = read_records(out / RECORDS)
        for study in studies:
            if study is not studies[0]:
                console.print()
            results = Results(study, size_of, records, settings=changed)
            written += _write(results, out)
            show(console, results)
    except KeyboardInterrupt:  # a second Ctrl-C ends it at once, with what was saved before
        _say_how_to_go_on(console)
        raise
    for problem in problems:
        say(console, Text.assemble(("failed", "bold red"), f" {problem}"))
    for file in written:
        console.print(f"written  {file}", soft_wrap=True)
    if signal is not None:
        _say_how_to_go_on(console)
        sys.exit(128 + signal)
    if problems:
        sys.exit(1)


def _say_how_to_go_on(console: Console) -> None:
    command = shlex.join(["bullettrain", *sys.argv[1:]])
    console.print(f"interrupted; the same command goes on:\n  {command}", soft_wrap=True)


def _config(row: Row, scale: Scale, settings: tuple[str, ...], seed: int, place: Place) -> Config:
    """The run of a row; on a GPU the network is compiled unless the user says otherwise."""
    config = row.config(scale, settings).replace_section("training", seed=seed)
    asked = any(setting.partition("=")[0] in ("compile", "training.compile") for setting in settings)
    if place.device.type == "cuda" and config.network.name != "small-cnn" and not asked:
        config = config.replace_section("training", compile=True)
    return config


def _make_folders(out: Path) -> None:
    """Before anything is trained: what comes of it can be written."""
    from bullettrain.data.base import unwritable
    from bullettrain.reproduction.rows import RECORDS, RUNS
    from bullettrain.training.folder import try_folder

    try:
        for folder in (out, out / RECORDS, out / RUNS):
            try_folder(folder)
    except OSError as error:
        raise unwritable(error, out, " with --out") from None


def _check(tasks: list[Task]) -> None:
    """Before anything is trained: what it will be judged by and on is there."""
    from bullettrain.data.base import elsewhere, root
    from bullettrain.evaluation import autoattack
    from bullettrain.training.settings import ConfigError

    if any("autoattack" in task.attacks for task in tasks):
        autoattack.installed()
    for task in tasks:
        folder = task.corruptions
        if "corruptions" in task.attacks and folder is not None and not folder.is_dir():
            words = ["bullettrain", "data", "corrupt", "--dataset", task.config.data.name, "--out", str(folder)]
            command = shlex.join([*words, *elsewhere(root(task.data_dir))])
            raise ConfigError(f"{folder} is missing: put the released files there, or make them with `{command}`")


def _run(console: Console, tasks: list[Task], jobs: int) -> tuple[int | None, list[str]]:
    """All runs that are not done; the signal that stopped them, and what went wrong."""
    from bullettrain.reproduction import jobs as processes
    from bullettrain.reproduction.rows import RECORDS, attack_name

    left = [task for task in tasks if task.is_left]
    unjudged = [task for task in tasks if not task.done and not task.is_left]
    _check(left)
    _make_folders(tasks[0].out)
    kept = len(tasks) - len(left)
    jobs = min(jobs, max(len(left), 1))
    left = [dataclasses.replace(task, jobs=jobs) for task in left]
    said = f"{len(left)} to train or judge" + (f", {kept} from before" if kept else "")
    console.print(f"{len(tasks)} run{'s' * (len(tasks) != 1)}: {said}")
    for task in unjudged:
        lacks = ", ".join(attack_name(attack) for attack in task.missing(task.record())) or "the score's ranks"
        text = f"left as on record, without {lacks} as asked for: its weights are not here; to train it anew, move"
        say(console, f"{task.label}: {text} {task.out / RECORDS / f'{task.name}.json'} away")
    problems, count = [], Counter[str]()

    def begun(task: Task) -> None:
        count["begun"] += 1
        number = f"{count['begun']}/{len(left)}"
        console.print(Text.assemble((f"{number}  {task.label}", "bold"), f"  {task.name}"), soft_wrap=True)

    def ended(outcome: Outcome) -> None:
        count["ended"] += 1
        if outcome.problem is not None:
            problems.append(f"{outcome.name}: {outcome.problem}")
        elif jobs > 1 and outcome.signal is None:
            console.print(f"done  {outcome.name}", soft_wrap=True)

    # Runs of the smallest scale are over before a bar could be read.
    quiet = all(not task.report for task in left)
    return processes.run_all(left, jobs=jobs, console=None if quiet else console, begun=begun, ended=ended), problems


def _time(console: Console, tasks: list[Task], how: How) -> list[str]:
    """The pace of all runs that are finished, into their records; what went wrong."""
    from bullettrain.reproduction import pace
    from bullettrain.reproduction.rows import RECORDS
    from bullettrain.training.setup import find_place

    finished = [record for task in tasks if (record := task.record()) is not None and record.finished]
    here = find_place(how.device).device
    left = [record for record in finished if not pace.is_timed(record, here)]
    kept = f", {len(finished) - len(left)} from before" if len(left) < len(finished) else ""
    console.print(f"{len(finished)} finished run{'s' * (len(finished) != 1)}: {len(left)} to be timed{kept}")
    out = {task.name: task.out / RECORDS for task in tasks}

    def found(record: Record) -> None:
        record.write(out[record.name])
        console.print(f"{record.pace['epoch_seconds']:8.2f} s an epoch  {record.name}", soft_wrap=True)

    return pace.measure(left, how, found)


def _write(results: Results, out: Path) -> list[Path]:
    """The study's table and pictures; the paths that a person opens."""
    from bullettrain.reproduction import figures, tables
    from bullettrain.training.folder import RunFolder

    name = results.study.name
    pictures = figures.write(results, out)
    page = tables.html(results, [(caption, address) for _, caption, address in pictures])
    RunFolder(out).write(f"{name}.html", page.encode())
    RunFolder(out).write(
        f"{name}.md", tables.markdown(results, [(picture, caption) for picture, caption, _ in pictures]).encode()
    )
    return [out / f"{name}.md", out / f"{name}.html", *(out / f"{picture}.png" for picture, _, _ in pictures)]
