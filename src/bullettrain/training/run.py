"""Training runs: new or resumed, alone or compared with the baseline."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bullettrain.config import RECIPES, Config
from bullettrain.config.settings import as_setting
from bullettrain.evaluation.comparison import difference
from bullettrain.models.external import is_external
from bullettrain.processes import Place
from bullettrain.run_folder import CHECKPOINT, SHARES, RunError, RunFolder, environment, preferred
from bullettrain.training import state
from bullettrain.training.recipe_files import read_recipe
from bullettrain.training.setup import load_data
from bullettrain.training.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """Outcome of a run."""

    folder: Path
    reason: str
    evaluations: dict[str, dict[str, dict[str, Any]]]
    """Records of test accuracy, by weights ("last", "best", "averaged") and attack."""
    end: dict[str, Any]
    """The last record: seconds, shares, work, speed-ups. Empty if the run has not ended."""

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """Test accuracy by weights and attack."""
        return {
            weights: {attack: record["accuracy"] for attack, record in records.items()}
            for weights, records in self.evaluations.items()
        }

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return self.reason == "finished"

    @property
    def signal(self) -> int | None:
        """The signal that stopped the run, if any."""
        number = self.reason.removeprefix("stopped by signal ")
        return int(number) if number.isdigit() else None

    @property
    def chosen(self) -> str:
        """Name of the preferred weights."""
        return preferred(self.evaluations)


def train(
    config: Config,
    out: Path,
    place: Place,
    *,
    data_dir: Path | None = None,
    resume: bool = False,
    keep_going: bool = False,
    console: Console | None = None,
) -> RunResult:
    """Train in the folder ``out``.

    Args:
        config: what to train.
        out: folder of the run.
        place: device and processes.
        data_dir: folder of the datasets.
        resume: continue from the checkpoint in ``out``, or start anew if there is none.
        keep_going: only warn when training collapses.
        console: where to show progress; None: nowhere.

    Raises:
        RunError: the folder cannot be used, or its checkpoint is damaged.
        CollapseError: training has collapsed.
    """
    folder = RunFolder(out)
    options = ["--keep-going"] * keep_going
    has_checkpoint = check_folder(folder, config, resume=resume, data_dir=data_dir, options=options)
    new = not folder.exists
    place.wait()  # until all processes have checked the folder
    if folder.finished:
        if place.first and has_checkpoint:  # a file of weights may be missing or damaged
            folder.export(folder.load())
        logger.info("%s is finished: there is nothing to resume", out)
        return read_result(folder)
    data = load_data(config, data_dir)
    trainer = Trainer(config, folder, place, data, console=console if place.first else None, keep_going=keep_going)
    with folder.locked() if place.first else contextlib.nullcontext():
        if place.first and (folder.finished or (not folder.exists, folder.has_checkpoint()) != (new, has_checkpoint)):
            raise RunError(f"another process has trained in {out}; check it, and run this command again")
        if has_checkpoint:
            state.resume(trainer)
        elif place.first:
            if new:
                folder.create(config, environment(place.device))
            folder.cut_metrics(0)
        start = ", anew: there is nothing to resume" if resume else ""
        start = f", from step {trainer.at.step}" if has_checkpoint else start
        logger.info("%s: %s on %s%s", out, config.recipe, place.device, start)
        if ":" in config.data.name:  # the user's own images
            logger.info("%s: %d training, %d validation and %d test images", config.data.name, *map(len, data))
        try:
            return read_result(folder, trainer.run())
        except RunError:
            if folder.exists:
                raise
            go_on = "if it was moved, go on with: bullettrain train NEW-PLACE --resume"
            raise RunError(f"{out} is gone: it was moved or deleted while it trained; {go_on}") from None


def check_folder(
    folder: RunFolder, config: Config, *, resume: bool, data_dir: Path | None = None, options: Sequence[str] = ()
) -> bool:
    """Return whether the folder has a checkpoint to resume from.

    Args:
        folder: of the run.
        config: what to train.
        resume: whether an existing run is to be continued.
        data_dir, options: other arguments for the command in error messages.

    Raises:
        RunError: the folder holds another run, an unfinished one without ``resume``, or one of an older format.
    """
    if not folder.exists:
        if folder.path.is_file() or (folder.path.is_dir() and folder.foreign()):
            raise RunError(f"{folder.path} exists and is not a run; choose another --out")
        return False
    differences = folder.config().differences(config)
    changed = "; ".join(f"{key} is {old} there and {new} here" for key, (old, new) in differences.items())
    if resume and changed:
        raise RunError(f"{folder.path} cannot be resumed with a changed configuration: {changed}")
    if folder.finished:
        if resume:
            return (folder.path / CHECKPOINT).is_file()
        raise RunError(f"{folder.path} holds a finished run; choose another --out")
    has_checkpoint = folder.has_checkpoint()
    if resume:
        return has_checkpoint
    if changed:
        raise RunError(f"{folder.path} holds a run of another configuration ({changed}); choose another --out")
    command = resume_command(config, folder.path, data_dir, options)
    raise RunError(f"{folder.path} holds an unfinished run; continue it with: {command}")


def resume_command(config: Config, out: Path, data_dir: Path | None = None, options: Sequence[str] = ()) -> str:
    """Return the command that resumes a run: recipe, changed settings, folder and other options.

    It names the network if that is a function: a recipe file alone may not have it imported.
    """
    source = config.recipe
    if source not in RECIPES and not Path(source).expanduser().exists():
        source = str(out)  # a run's folder is a recipe, too
    changed = read_recipe(source).differences(config)
    world = os.environ.get("WORLD_SIZE", "1")
    words = ["bullettrain"] if world == "1" else ["torchrun", "--nproc-per-node", world, "-m", "bullettrain"]
    words += ["train", source]
    if source not in RECIPES and is_external(config.network.name):
        words += ["--network", config.network.name]
    for key, (_, value) in changed.items():
        words += ["--set", f"{key}={as_setting(value)}"]
    words += ["--data-dir", str(data_dir)] if data_dir else []
    return shlex.join([*words, *options, "--out", str(out), "--resume"])


def read_result(folder: RunFolder, reason: str | None = None) -> RunResult:
    """Return the result of a run from its records."""
    evaluations: dict[str, dict[str, dict[str, Any]]] = {}
    records = folder.records()
    for record in records:
        if record.get("kind") == "evaluation":
            evaluations.setdefault(record["weights"], {})[record["attack"]] = record
    end: dict[str, Any] = next((record for record in reversed(records) if record.get("kind") == "end"), {})
    return RunResult(folder.path, reason or end.get("reason", "unfinished"), evaluations, end)


def compare(
    config: Config,
    out: Path,
    place: Place,
    *,
    data_dir: Path | None = None,
    resume: bool = False,
    keep_going: bool = False,
    console: Console | None = None,
) -> tuple[RunResult, RunResult]:
    """Train without and with BulletTrain, in ``out``/baseline and ``out``/bullettrain; arguments as for `train`."""
    existing = [folder for name in ("baseline", "bullettrain") if (folder := RunFolder(out / name)).exists]
    if existing and not resume:
        if len(existing) == 2 and all(folder.finished for folder in existing):
            raise RunError(f"{out} holds a finished comparison; choose another --out")
        command = resume_command(config, out, data_dir, ["--compare", *["--keep-going"] * keep_going])
        raise RunError(f"{out} holds an unfinished comparison; continue it with: {command}")
    run = partial(train, place=place, data_dir=data_dir, resume=resume, keep_going=keep_going, console=console)
    baseline = run(config.baseline(), out / "baseline")
    if not baseline.finished:
        return baseline, baseline
    mined = run(config, out / "bullettrain")
    if mined.finished and place.first:
        RunFolder(out).write_json("comparison.json", comparison(baseline, mined))
    return baseline, mined


def comparison(baseline: RunResult, mined: RunResult) -> dict[str, Any]:
    """Return both rows, the three speed-ups and, by attack, the standard error of the difference in accuracy."""
    keys = ("seconds", "capture_seconds", *SHARES, "work")
    rows = [
        {"name": name, "weights": result.chosen, **result.accuracy[result.chosen], **{k: result.end[k] for k in keys}}
        for name, result in (("baseline", baseline), ("bullettrain", mined))
    ]
    speedup = {
        "theoretical": mined.end["theoretical_speedup"],
        "work": baseline.end["work"] / mined.end["work"],
        "wall_clock": baseline.end["seconds"] / mined.end["seconds"],
    }
    plain, own = (result.evaluations[result.chosen] for result in (baseline, mined))
    differences = {attack: difference([own[attack]], [plain[attack]]) for attack in plain}
    errors = {attack: {"error": change.error, "paired": change.paired} for attack, change in differences.items()}
    return {"rows": rows, "speedup": speedup, "errors": errors}
