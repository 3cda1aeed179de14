"""`bullettrain reproduce`: reproduce the paper's tables and figures."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.text import Text

from bullettrain.cli.commands import Reproduce
from bullettrain.cli.options import check_apart, check_out, one_process
from bullettrain.config.settings import ConfigError
from bullettrain.data.base import elsewhere, root
from bullettrain.evaluation import autoattack
from bullettrain.formatting import plural
from bullettrain.precision import Precision
from bullettrain.reproduction import figures, runs, tables
from bullettrain.reproduction.records import Record, read_records
from bullettrain.reproduction.results import NOT_RUN, Results, Verdict
from bullettrain.reproduction.rows import Row
from bullettrain.reproduction.runs import TaskResult
from bullettrain.reproduction.scales import SCALES, Scale
from bullettrain.reproduction.studies import LARGE, RANKS, STUDIES, Study
from bullettrain.reproduction.tasks import DONE, ON_RECORD, RECORDS, RUNS, Task, attack_name, merged
from bullettrain.run_folder import RunFolder, environment
from bullettrain.terminal import duration, logged, say, say_interrupted, say_rows, show_table, terminal
from bullettrain.validation import check_known

CORRUPTIONS = {"cifar10": "CIFAR-10-C", "cifar100": "CIFAR-100-C"}
"""Folders of the corrupted test sets, beside the datasets."""
LOGGER = "bullettrain.reproduction"
"""The logger whose messages are shown; those of each run are not."""
CHECKOUT = Path(__file__).resolve().parents[3] / "results"
"""The published records, in a checkout of the repository."""
STYLES: dict[Verdict | None, str] = dict(zip(Verdict, ("green", "yellow", "yellow", "red", "dim"), strict=True))
SHORT_HEADINGS = {
    **{"shares": "B / R / O %", "corruptions": "corr. %", "rank_correct": "ρ, correct"},
    **{"theoretical": "theor. ×", "wall": "wall ×"},
}
MAX_ROWS_LISTED = 30
"""With more rows than this, only those that were run are listed."""
logger = logging.getLogger(LOGGER)


def reproduce(options: Reproduce) -> None:
    """Run `bullettrain reproduce`."""
    console, command = terminal(), shlex.join(["bullettrain", *sys.argv[1:]])
    names = options.names or ([LARGE] if options.scale in ("medium", "paper") else [])
    if not names:
        show_list(console)
        return
    for name in names:
        check_known(name, STUDIES, "there is nothing to reproduce called", error=ConfigError)
    studies, scale = [STUDIES[name] for name in dict.fromkeys(names)], options.scale or "smoke"
    check_known(scale, SCALES, "--scale is", error=ConfigError)
    if options.precision is not None:
        check_known(options.precision, typing.get_args(Precision), "--precision is", error=ConfigError)
    for modes in (("train_only", "tables", "timing"), ("tables", "timing", "dry_run")):
        check_apart(**{mode: getattr(options, mode) for mode in modes})
    patterns = [part for text in options.rows or [] for part in text.split(",") if part]
    if options.rows and not patterns:
        raise ConfigError("--rows names no row; leave it out to run all of them")
    if patterns and len(studies) > 1:
        raise ConfigError(f"--rows {','.join(patterns)} goes with one name; there are {len(studies)}")
    device = one_process(options.device)
    at, out = SCALES[scale], options.out or Path("runs") / "reproduce" / scale
    chosen = [(study, row) for study in studies for row in study.chosen(at, patterns)]
    seeds = range(options.seeds)
    tasks = merged([_task(options, study, row, at, seed, out, device) for seed in seeds for study, row in chosen])
    records = read_records(out / RECORDS)  # find damaged records before training
    if options.dry_run:
        title = f"{', '.join(study.name for study in studies)}, scale {scale}"
        show_plan(console, title, tasks, on_record() | records, environment(device)["device"], options.jobs)
        return
    trains = not (options.timing or options.tables)
    remaining = [task for task in tasks if trains and task.state() not in (DONE, ON_RECORD)]
    _check(remaining)
    for folder in (out, out / RECORDS, out / RUNS):
        check_out(folder)
    written: list[Path] = []
    with logged(console, LOGGER):
        try:
            if options.timing:
                done = _time(tasks, device, options)
            elif options.tables:
                done = [runs.perform(task) for task in tasks if task.trained]  # add results of `evaluate`
            else:
                done = _run(console, tasks, remaining, options.jobs)
            records = read_records(out / RECORDS)
            for study in studies:
                if study is not studies[0]:
                    console.print()
                results = Results(study, at, records, settings=options.settings or ())
                written += _write(results, out)
                show(console, results)
        except KeyboardInterrupt:  # a second Ctrl-C
            say_interrupted(console, command)
    problems = [f"{result.name}: {result.problem}" for result in done if result.problem is not None]
    for problem in problems:
        say(console, Text.assemble(("failed", "bold red"), f" {problem}"))
    for file in written:
        console.print(f"written  {file}", soft_wrap=True)
    for result in done:
        if result.signal is not None:
            say_interrupted(console, command, signal=result.signal)
    if problems:
        sys.exit(1)


def _task(options: Reproduce, study: Study, row: Row, scale: Scale, seed: int, out: Path, device: torch.device) -> Task:
    """Return the task of a row. On a GPU, the network is compiled unless the user sets it."""
    settings = options.settings or ()
    config = row.config(scale, settings).replace_section("training", seed=seed)
    is_set = any(setting.partition("=")[0] in ("compile", "training.compile") for setting in settings)
    if device.type == "cuda" and config.network.name != "small-cnn" and not is_set:
        config = config.replace_section("training", compile=True)
    images = scale.images if row.images is None or not scale.like_paper else row.images
    attacks = [attack for attack in (*study.attacks, *row.attacks) if row.baseline or attack != RANKS]
    corrupted = CORRUPTIONS.get(config.data.name)
    return Task(
        config,
        out,
        () if options.train_only or options.tables else tuple(scale.attacks.get(attack, attack) for attack in attacks),
        images=images if options.images is None else options.images,
        precision=cast(Precision | None, options.precision),
        corruptions=root(options.data_dir) / corrupted if corrupted else None,
        data_dir=options.data_dir,
        device=options.device,
        report=scale.like_paper,
        label=row.name if seed == 0 else f"{row.name}, seed {seed}",
    )


def _check(tasks: list[Task]) -> None:
    """Raise an error before training if AutoAttack or the corrupted test set is missing."""
    if any("autoattack" in task.attacks for task in tasks):
        autoattack.installed()
    for task in tasks:
        folder = task.corruptions
        if "corruptions" in task.attacks and folder is not None and not folder.is_dir():
            words = ["bullettrain", "data", "corrupt", "--dataset", task.config.data.name, "--out", str(folder)]
            command = shlex.join([*words, *elsewhere(root(task.data_dir))])
            raise ConfigError(f"{folder} is missing: put the released files there, or make them with `{command}`")


def _run(console: Console, tasks: list[Task], remaining: list[Task], jobs: int) -> list[TaskResult]:
    """Perform the ``remaining`` ones of ``tasks``."""
    _announce("run", tasks, remaining, "train or evaluate")
    for task in tasks:
        if task.state() == ON_RECORD and (record := task.record()) is not None:
            lacks = ", ".join(attack_name(attack) for attack in task.missing(record))
            text = f"the record lacks {lacks}, and its weights are not here; to train it again, move"
            logger.info("%s: %s %s away", task.label, text, task.out / RECORDS / f"{task.name}.json")
    jobs = min(jobs, max(len(remaining), 1))
    # Runs of scale smoke are too short for a progress bar.
    bars = console if any(task.report for task in remaining) else None
    return runs.run_all([dataclasses.replace(task, jobs=jobs) for task in remaining], jobs=jobs, console=bars)


def _time(tasks: list[Task], device: torch.device, options: Reproduce) -> list[TaskResult]:
    """Time the finished runs, and add the times to their records."""
    finished = [record for task in tasks if (record := task.record()) is not None and record.finished]
    remaining = [record for record in finished if not runs.is_timed(record, device)]
    _announce("finished run", finished, remaining, "be timed")
    return [runs.time_run(record, tasks[0].out / RECORDS, options.data_dir, options.device) for record in remaining]


def _announce(what: str, items: Sequence[object], remaining: Sequence[object], todo: str) -> None:
    """Log `5 runs: 2 to train or evaluate, 3 from before`."""
    total, count = len(items), len(remaining)
    kept = f", {total - count} from before" if count < total else ""
    logger.info("%d %s: %d to %s%s", total, plural(what, total), count, todo, kept)


def _write(results: Results, out: Path) -> list[Path]:
    """Write the tables and figures of a study. Returns the files to open."""
    pictures = figures.write(results, out)
    pages = {
        f"{results.study.name}.md": tables.markdown(results, [(f"{name}.png", text) for name, text, _ in pictures]),
        f"{results.study.name}.html": tables.html(results, [(text, address) for _, text, address in pictures]),
    }
    for name, page in pages.items():
        RunFolder(out).write(name, page.encode())
    return [out / name for name in (*pages, *(f"{name}.png" for name, _, _ in pictures))]


def show_list(console: Console) -> None:
    """Print the studies and the scales."""
    say_rows(console, [(Text(study.name, "bold"), study.title) for study in STUDIES.values()])
    console.print()
    say_rows(console, [(Text.assemble("--scale ", (scale.name, "bold")), scale.about) for scale in SCALES.values()])


def show(console: Console, results: Results) -> None:
    """Print the table, remarks on its rows, and the claims."""
    console.print(results.study.title, style="bold")
    columns, few = list(tables.columns(results)), len(results.rows) <= MAX_ROWS_LISTED
    rows = [row for row in results.rows.values() if few or results.runs[row.name]]
    headings = [
        SHORT_HEADINGS.get(column.metric, column.heading) if column.kind == "ours" else column.heading
        for column in columns
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
    notes = results.notes() if results.scale.like_paper else []
    for text in (*(f"{status}: {'; '.join(names)}" for status, names in statuses.items()), *notes):
        say(console, text, style="dim")
    marks = {verdict: Text(f"{tables.MARKS[verdict]} {verdict.value}", STYLES[verdict]) for verdict in Verdict}
    say_rows(console, [(marks[verdict], text) for verdict, text, _ in tables.claims(results)])
    if not results.scale.like_paper:
        say(console, "scale smoke only shows that everything runs; its figures mean nothing", style="dim")


def _cell(results: Results, row: Row, column: tables.Column) -> Text:
    cell = tables.cell(results, row, column)
    return Text(cell.marked, STYLES.get(cell.verdict, "dim" if column.kind == "paper" else ""))


def on_record() -> dict[str, Record]:
    """Return the published records of all scales."""
    folders = sorted(CHECKOUT.glob("reproduce/*/records"))
    return {name: record for folder in folders for name, record in read_records(folder).items()}


def show_plan(
    console: Console, title: str, tasks: Sequence[Task], records: Mapping[str, Record], device: str, jobs: int
) -> None:
    """Print what would run, and the training time if it was measured."""
    say(console, f"{title}, on {device}", style="bold")
    groups: dict[str, list[str]] = {}
    for task in tasks:
        training = task.config.training
        group = f", {training.attack_group} mini-batches attacked at once" if training.attack_group > 1 else ""
        groups.setdefault(f"{task.config.network.name}, {training.epochs} epochs{group}", []).append(task.label)
    for text, labels in groups.items():
        say(console, text if len(groups) == 1 else f"{text}: {', '.join(labels)}")
    console.print(f"runs and records in {tasks[0].out}", soft_wrap=True)
    rows, total, unknown = [], 0.0, 0
    for task in tasks:
        state, cells = task.state(), ["", ""]
        if state not in (DONE, ON_RECORD):
            estimate = estimate_training(task, records, device)
            cells = [duration(estimate[0]), estimate[1]] if estimate else ["not measured", ""]
            total, unknown = total + (estimate[0] if estimate else 0.0), unknown + (estimate is None)
        rows.append([task.label, state, *cells])
    show_table(console, ["row", "state", "training", "measured on"], rows, left=["state", "measured on"])
    besides = f", besides {unknown} that {'was' if unknown == 1 else 'were'} not measured" if unknown else ""
    shared = f"; {jobs} concurrent runs share the device" if jobs > 1 else ""
    say(console, f"altogether {duration(total)} of training, one run after another{besides}{shared}")
    say(console, "without compilation and evaluation, of which AutoAttack may take longer than training")


def estimate_training(task: Task, records: Mapping[str, Record], device: str) -> tuple[float, str] | None:
    """Return the remaining seconds of training, and the device of the record that they are estimated from.

    Records of ``device`` come first. Returns None if no record of the run, with any seed, has its time.
    """
    runs = [run for run in records.values() if run.timed_seconds and run.stem == task.name.rpartition("-s")[0]]
    run = min(runs, key=lambda run: run.timed_in.get("device") != device, default=None)
    if run is None or run.timed_seconds is None:
        return None
    epochs = task.config.training.epochs - task.epochs_done()
    return epochs * run.timed_seconds / run.epochs, str(run.timed_in.get("device"))
