"""`bullettrain evaluate`: measure accuracy under attacks and corruptions."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.text import Text

from bullettrain.cli.commands import Evaluate
from bullettrain.cli.options import load, one_process
from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError, number
from bullettrain.data import load as load_data
from bullettrain.errors import raised_as, read_settings_text
from bullettrain.evaluation import evaluate as evaluation
from bullettrain.evaluation.progress import EvaluationProgress, interval, share
from bullettrain.evaluation.results import FILE, Entry, Result, Store
from bullettrain.evaluation.specs import Defaults, NormName, check_ball, parse_attacks, threat_of
from bullettrain.loading import find_source
from bullettrain.precision import Precision
from bullettrain.processes import StoppedError, StopRequest
from bullettrain.reporting import write_reports
from bullettrain.reporting.attack_rows import AttackRow, difference, mean_in_words, rows, weakest
from bullettrain.run_folder import RunError, RunFolder
from bullettrain.schema import conform
from bullettrain.terminal import duration, say, say_interrupted, show_table, terminal
from bullettrain.training.setup import threads_of
from bullettrain.validation import check_known

STYLES = {"attack": "", "part": "dim", "worst": "bold"}
COLUMNS = ("attack", "threat", "accuracy", "95 %", "paper", "time")
DROPPED = ("time", "95 %", "threat")
"""Columns that a narrow terminal leaves out, in this order."""


def evaluate(options: Evaluate) -> None:
    """Run `bullettrain evaluate`."""
    console = terminal()
    source = find_source(options.model, options.weights)
    config = source.config
    defaults = _defaults(config, options.eps, options.norm)
    attacks = parse_attacks(options.attack or ["pgd20"], defaults)
    if (options.corruptions or options.mce_baseline) and "corruptions" not in {attack.name for attack in attacks}:
        raise ConfigError("--corruptions and --mce-baseline go with --attack corruptions")
    check_known(options.precision, ("float32", "tf32", "bf16", "both"), "--precision is", error=ConfigError)
    precisions = ["float32", "bf16"] if options.precision == "both" else [options.precision]
    device = one_process(options.device)
    plan = evaluation.Plan(
        attacks,
        cast(list[Precision], precisions),
        batch_size=options.batch_size or (1000 if device.type == "cuda" else 500),
        seed=options.seed,
        compiled=options.compile_,
        curves=defaults if options.curves else None,
        curve_images=options.curve_images,
        corruptions=options.corruptions,
        mce_baseline=_baseline(options.mce_baseline),
        overwrite=options.overwrite,
        images=options.images,
    )
    if config is not None and (threads := threads_of(config, device)):
        torch.set_num_threads(threads)  # as in training
    data, image_size = options.data or (config.data.name if config else None), options.image_size
    if data is None:
        raise ConfigError("say which images to evaluate it on, e.g. --data cifar10")
    if image_size is None and config is not None and data == config.data.name:
        image_size = config.data.image_size
    test = load_data(data, split="test", root=options.data_dir, image_size=image_size)
    if options.images > len(test):
        raise ConfigError(f"--images is {options.images}, but {data} has {len(test)} test images; give 0 for all")
    _, channels, side, _ = test.images.shape
    loaded = load(options, channels=channels, image_size=side, classes=len(test.classes))
    folder = options.out or source.folder or Path("runs") / f"evaluate-{_folder_name(options.model)}"
    if RunFolder(folder).exists and (source.folder is None or not folder.samefile(source.folder)):
        raise ConfigError(f"--out {folder} is a run, but not the one that is evaluated; choose another --out")
    store = Store(folder)
    console.print(f"{source}: {options.images or len(test)} images of {data} on {device}", soft_wrap=True)
    with StopRequest() as stop:
        try:
            with store.locked(), EvaluationProgress(console, stop) as progress:
                entry, asked = evaluation.evaluate(
                    loaded, test, data, plan, device=device, store=store, progress=progress
                )
        except (StoppedError, KeyboardInterrupt):  # a second Ctrl-C
            words = [word for word in sys.argv[1:] if not (store.forgot and word == "--overwrite")]
            how = "resume without --overwrite, which would start over" if store.forgot else "resume with"
            say_interrupted(console, shlex.join(["bullettrain", *words]), how, stop.signal)
    show(console, entry, asked, config, curves=options.curves)
    console.print(f"written  {folder / FILE}", soft_wrap=True)
    # E.g. a damaged run; the results are saved.
    with raised_as(RunError, f"report.html could not be written to {folder}: {{error}}", OSError, ValueError):
        for page in write_reports(folder):
            console.print(f"report   {page}", soft_wrap=True)


def _defaults(config: Config | None, eps: str | None, norm: str | None) -> Defaults:
    """Return norm and eps for attacks that do not set them: from the options, else the run, else the paper."""
    own = threat_of(config) if config else Defaults()
    check_known(norm or own.norm, ("linf", "l2"), "--norm is", error=ConfigError)
    chosen = Defaults(cast(NormName, norm or own.norm))
    if eps is not None:
        check_ball(chosen.norm, radius := number(eps), "--")
        chosen = Defaults(chosen.norm, radius)
    return own if chosen.norm == own.norm and chosen.eps in (None, own.eps) else chosen


def _baseline(path: Path | None) -> dict[str, list[float]] | None:
    unread = f"--mce-baseline {path} cannot be read ({{error}}); give JSON of the form {{corruption: [accuracy, …]}}"
    with raised_as(ConfigError, unread, OSError, ValueError, RecursionError):
        return conform(json.loads(read_settings_text(path)), dict[str, list[float]]) if path else None


def _folder_name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name if Path(model).exists() else model).strip("-")


def show(console: Console, entry: Entry, asked: Sequence[Result], config: Config | None, *, curves: bool) -> None:
    """Print the results of an evaluation, with its worst case, its weakest class and its warnings."""
    precisions = list(dict.fromkeys(result.precision for result in asked))
    for precision in precisions:
        attack_rows = rows(entry, [result for result in asked if result.precision == precision], config)
        suffix = f", {precision}" if precisions != ["float32"] else ""
        console.print(f"{entry.model}{suffix}", style="bold", soft_wrap=True)
        styles = [STYLES[row.kind] for row in attack_rows]
        show_table(console, COLUMNS, map(_cells, attack_rows), left=["threat"], dropped=DROPPED, styles=styles)
    for result in asked:
        if result.corruptions:
            severities = [
                [name.replace("_", " "), *(f"{100 * value:.1f}" for value in (sum(values) / len(values), *values))]
                for name, values in result.corruptions["accuracy"].items()
            ]
            show_table(console, ["corruption, %", "mean", "1", "2", "3", "4", "5"], severities)
            say(console, mean_in_words(result))
    for text in (weakest(entry, asked), difference(asked, entry.results)):
        if text:
            say(console, text)
    for warning in entry.warnings:
        say(console, Text.assemble(("warning", "bold yellow"), f" {warning}"))
    if curves and not entry.warnings:
        say(console, "no sign of gradient masking")


def _cells(row: AttackRow) -> list[str]:
    return [
        f"  {row.name}" if row.kind == "part" else row.name,
        row.threat,
        share(row.accuracy),
        interval(row.interval).strip("()") if row.interval else "",
        share(row.paper) if row.paper is not None else "",
        duration(row.seconds) if row.seconds is not None else "",
    ]
