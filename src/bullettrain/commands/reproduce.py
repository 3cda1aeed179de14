"""`bullettrain reproduce`: a table or a figure of the paper, from real runs, beside the paper's own."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.text import Text

from bullettrain.commands.options import Device
from bullettrain.terminal import logged, say, terminal

if TYPE_CHECKING:
    from bullettrain.config.sections import Config
    from bullettrain.processes import Place
    from bullettrain.reproduction.results import Results
    from bullettrain.reproduction.rows import Row
    from bullettrain.reproduction.runs import TaskResult
    from bullettrain.reproduction.scales import Scale
    from bullettrain.reproduction.studies import Study
    from bullettrain.reproduction.tasks import Task

CORRUPTIONS = {"cifar10": "CIFAR-10-C", "cifar100": "CIFAR-100-C"}
"""Folders beside a dataset where its corruptions are looked for."""
LOGGED = "bullettrain.reproduction"
"""What is shown of the package's log: not that of each run."""
logger = logging.getLogger(LOGGED)


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Tables and figures. Without a name: list them.")
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="smoke, short, medium, paper: digits in seconds, minutes on a GPU, WRN-34-10 for 30 epochs, or as in "
            "the paper. Default: smoke. Without a name, medium and paper train WRN-34-10. For speed, these two attack "
            "k = 4 mini-batches at once; in the paper k is 1, as with --set attack_group=1."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of runs, records and tables. Default: runs/reproduce/SCALE.")
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", metavar="ROW", help="Only these rows, separated by commas; * matches anything."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per row; tables then show mean ± std.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Number of concurrent runs; disables timing.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every row; repeatable."),
    ] = None,
    images: Annotated[
        int | None, typer.Option(min=0, help="Test images for the attacks after training; 0: all.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precision in which these attacks search: float32, tf32 or bf16. Tables mention it. Default: float32, "
            "unless there is a result already."
        ),
    ] = None,
    train_only: Annotated[
        bool,
        typer.Option("--train-only", help="Skip these attacks; run them later, without this option or by `evaluate`."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run and how long its training takes, and exit.")
    ] = False,
    only_tables: Annotated[
        bool,
        typer.Option(
            "--tables", help="Train nothing; write tables and pictures of finished runs, with what `evaluate` found."
        ),
    ] = False,
    timing: Annotated[
        bool,
        typer.Option(
            "--timing",
            help="Train nothing; time the steps of finished runs, one run at a time: for minutes and wall-clock of "
            "runs that shared the device.",
        ),
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where datasets lie. Default: $BULLETTRAIN_DATA, then the user's cache.")
    ] = None,
    device: Device = None,
) -> None:
    """Reproduce a table or a figure of the paper, next to the paper's own figures.

    Finished runs are kept, and shared between tables; the same command again continues where it was stopped.

    Examples:

      bullettrain reproduce

      bullettrain reproduce table-trades --scale smoke

      bullettrain reproduce table-trades --scale short --rows trades,bt-nr2 --seeds 3 --dry-run

      bullettrain reproduce fig-gamma fig-nr --scale short --jobs 3

      bullettrain reproduce --scale medium --dry-run
    """
    from bullettrain.commands.reproduce_terminal import on_record, show, show_list, show_plan
    from bullettrain.config.settings import ConfigError
    from bullettrain.data.base import root
    from bullettrain.precision import Precision
    from bullettrain.processes import find_place
    from bullettrain.reproduction.records import read_records
    from bullettrain.reproduction.results import Results
    from bullettrain.reproduction.runs import perform
    from bullettrain.reproduction.scales import SCALES
    from bullettrain.reproduction.studies import LARGE, RANKS, STUDIES
    from bullettrain.reproduction.tasks import RECORDS, Task, merged
    from bullettrain.run_folder import environment
    from bullettrain.validation import instead

    console = terminal()
    if not names and scale in ("medium", "paper"):
        names = [LARGE]
    if not names:
        show_list(console)
        return
    for name in names:
        if name not in STUDIES:
            raise ConfigError(f"there is nothing called {name!r} to reproduce{instead(name, STUDIES)}")
    scale = scale or "smoke"
    if scale not in SCALES:
        raise ConfigError(f"--scale is {scale!r}{instead(scale, SCALES)}")
    studies, at = [STUDIES[name] for name in dict.fromkeys(names)], SCALES[scale]
    patterns = [part for text in rows or [] for part in text.split(",") if part]
    if rows and not patterns:
        raise ConfigError("--rows names no row; leave it out to run all of them")
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
    modes = {"--train-only": train_only, "--tables": only_tables, "--timing": timing, "--dry-run": dry_run}
    if sum(modes.values()) > 1:
        given = " and ".join(mode for mode, wanted in modes.items() if wanted)
        raise ConfigError(f"{given} do not go together; give one of them")

    evaluated = not (train_only or only_tables)

    def task(study: Study, row: Row, seed: int) -> Task:
        config = _config(row, at, changed, seed, place)
        usual = at.images if row.images is None or not at.like_paper else row.images
        wanted = [attack for attack in (*study.attacks, *row.attacks) if not (row.plain and attack == RANKS)]
        return Task(
            config,
            out,
            attacks=tuple(at.attacks.get(attack, attack) for attack in wanted) if evaluated else (),
            images=usual if images is None else images,
            precision=cast(Precision | None, precision),
            corruptions=root(data_dir) / CORRUPTIONS[config.data.name] if config.data.name in CORRUPTIONS else None,
            data_dir=data_dir,
            device=device,
            report=at.like_paper,
            label=row.name if seed == 0 else f"{row.name}, seed {seed}",
        )

    chosen = [(study, row) for study in studies for row in study.chosen(at, patterns)]
    tasks = merged([task(study, row, seed) for seed in range(seeds) for study, row in chosen])
    records = read_records(out / RECORDS)  # one that is damaged is better found now than after all is trained
    if dry_run:
        title = f"{', '.join(study.name for study in studies)}, scale {scale}"
        show_plan(console, title, tasks, on_record(at) | records, environment(place.device)["device"], jobs)
        return
    written: list[Path] = []
    with logged(console, LOGGED):
        try:
            if timing or only_tables:
                _make_folders(out)
            if timing:
                done = _time(tasks, device, data_dir)
            elif only_tables:
                done = [perform(task) for task in tasks if task.trained]  # what `evaluate` has found since
            else:
                done = _run(console, tasks, jobs)
            records = read_records(out / RECORDS)
            for study in studies:
                if study is not studies[0]:
                    console.print()
                results = Results(study, at, records, settings=changed)
                written += _write(results, out)
                show(console, results)
        except KeyboardInterrupt:  # a second Ctrl-C ends it at once, with what was saved before
            _say_how_to_go_on(console)
            raise
    problems = [f"{result.name}: {result.problem}" for result in done if result.problem is not None]
    for problem in problems:
        say(console, Text.assemble(("failed", "bold red"), f" {problem}"))
    for file in written:
        console.print(f"written  {file}", soft_wrap=True)
    for result in done:
        if result.signal is not None:
            _say_how_to_go_on(console)
            sys.exit(128 + result.signal)
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
    from bullettrain.reproduction.tasks import RECORDS, RUNS
    from bullettrain.run_folder import try_folder

    for folder in (out, out / RECORDS, out / RUNS):
        try_folder(folder)


def _check(tasks: list[Task]) -> None:
    """Before anything is trained: what it will be evaluated by and on is there."""
    from bullettrain.config.settings import ConfigError
    from bullettrain.data.base import elsewhere, root
    from bullettrain.evaluation import autoattack

    if any("autoattack" in task.attacks for task in tasks):
        autoattack.installed()
    for task in tasks:
        folder = task.corruptions
        if "corruptions" in task.attacks and folder is not None and not folder.is_dir():
            words = ["bullettrain", "data", "corrupt", "--dataset", task.config.data.name, "--out", str(folder)]
            command = shlex.join([*words, *elsewhere(root(task.data_dir))])
            raise ConfigError(f"{folder} is missing: put the released files there, or make them with `{command}`")


def _run(console: Console, tasks: list[Task], jobs: int) -> list[TaskResult]:
    """All runs that are not done."""
    from bullettrain.reproduction.runs import run_all
    from bullettrain.reproduction.tasks import DONE, ON_RECORD, RECORDS, attack_name

    states = [task.state() for task in tasks]
    left = [task for task, state in zip(tasks, states, strict=True) if state not in (DONE, ON_RECORD)]
    _check(left)
    _make_folders(tasks[0].out)
    kept = len(tasks) - len(left)
    said = f"{len(left)} to train or evaluate" + (f", {kept} from before" if kept else "")
    logger.info("%d run%s: %s", len(tasks), "s" * (len(tasks) != 1), said)
    for task, state in zip(tasks, states, strict=True):
        if state == ON_RECORD and (record := task.record()) is not None:
            lacks = ", ".join(attack_name(attack) for attack in task.missing(record))
            text = f"left as on record, without {lacks} as asked for: its weights are not here; to train it anew, move"
            logger.info("%s: %s %s away", task.label, text, task.out / RECORDS / f"{task.name}.json")
    jobs = min(jobs, max(len(left), 1))
    # Runs of the smallest scale are over before a bar could be read.
    bars = console if any(task.report for task in left) else None
    return run_all([dataclasses.replace(task, jobs=jobs) for task in left], jobs=jobs, console=bars)


def _time(tasks: list[Task], device: str | None, data_dir: Path | None) -> list[TaskResult]:
    """The timing of all runs that are finished, into their records."""
    from bullettrain.processes import find_place
    from bullettrain.reproduction.runs import is_timed, time_run
    from bullettrain.reproduction.tasks import RECORDS

    finished = [record for task in tasks if (record := task.record()) is not None and record.finished]
    left = [record for record in finished if not is_timed(record, find_place(device).device)]
    kept = f", {len(finished) - len(left)} from before" if len(left) < len(finished) else ""
    logger.info("%d finished run%s: %d to be timed%s", len(finished), "s" * (len(finished) != 1), len(left), kept)
    return [time_run(record, tasks[0].out / RECORDS, data_dir, device) for record in left]


def _write(results: Results, out: Path) -> list[Path]:
    """The study's table and pictures; the paths that a person opens."""
    from bullettrain.reproduction import figures, tables
    from bullettrain.run_folder import RunFolder

    pictures = figures.write(results, out)
    pages = {
        f"{results.study.name}.md": tables.markdown(results, [(f"{name}.png", text) for name, text, _ in pictures]),
        f"{results.study.name}.html": tables.html(results, [(text, address) for _, text, address in pictures]),
    }
    for name, page in pages.items():
        RunFolder(out).write(name, page.encode())
    return [out / name for name in (*pages, *(f"{name}.png" for name, _, _ in pictures))]
