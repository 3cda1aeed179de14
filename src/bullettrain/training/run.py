"""From a config to a finished run folder: new or resumed, alone or beside its baseline."""

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
class Result:
    """How a run ended, and its figures."""

    folder: Path
    reason: str
    evaluations: dict[str, dict[str, dict[str, Any]]]
    """By weights ("last", "best", "averaged"), then by attack: the records of accuracy on the test set."""
    end: dict[str, Any]
    """The last record: seconds, shares, work, speed-ups."""

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """By weights, then by attack."""
        return {
            weights: {name: r["accuracy"] for name, r in found.items()} for weights, found in self.evaluations.items()
        }

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.reason == "finished"

    @property
    def signal(self) -> int | None:
        """The signal that stopped it, if one did."""
        number = self.reason.removeprefix("stopped by signal ")
        return int(number) if number.isdigit() else None

    @property
    def chosen(self) -> str:
        """The weights a user would take."""
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
) -> Result:
    """Train in the folder ``out``.

    Args:
        config: what to train.
        out: folder of the run.
        place: device and processes.
        data_dir: where datasets lie.
        resume: go on where the run in ``out`` was stopped; from the start where it has no checkpoint yet.
        keep_going: warn of a collapse, and go on.
        console: where progress is shown; None: nowhere.

    Raises:
        RunError: the folder holds something else, or its checkpoint is damaged.
        CollapseError: the run has collapsed.
    """
    folder = RunFolder(out)
    going_on = check_folder(folder, config, resume=resume, data_dir=data_dir, options=_flags(keep_going))
    new = not folder.exists
    place.wait()  # nobody may write before everybody has looked
    if folder.finished:
        if place.first and going_on:  # it was moved, or a file of weights is missing or damaged
            folder.export(folder.load())
        return read_result(folder)
    data = load_data(config, data_dir)
    trainer = Trainer(config, folder, place, data, console=console if place.first else None, keep_going=keep_going)
    with folder.alone() if place.first else contextlib.nullcontext():  # before anything in it is changed
        if place.first and (folder.finished or (not folder.exists, folder.has_checkpoint()) != (new, going_on)):
            raise RunError(f"another process has trained in {out} meanwhile; look at it, and start this again")
        if going_on:
            state.resume(trainer)
        elif place.first:
            if new:
                folder.create(config, environment(place.device))
            folder.cut_metrics(0)
        where = f", from step {trainer.at.step}" if going_on else ", anew: there is nothing to resume" if resume else ""
        logger.info("%s: %s on %s%s", out, config.recipe, place.device, where)
        if ":" in config.data.name:  # of one's own images one wants to know how they were divided
            train, held_out, test = map(len, data)
            said = f", {held_out} held out" if held_out else ""
            logger.info("%s: %d images to train on%s, %d to test by", config.data.name, train, said, test)
        try:
            return read_result(folder, trainer.run())
        except RunError:
            if folder.exists:
                raise
            raise RunError(
                f"{out} is gone: it was moved or deleted while it trained; if it was moved, go on with: "
                "bullettrain train NEW-PLACE --resume"
            ) from None


def _flags(keep_going: bool) -> list[str]:
    """What a printed command has to have, too."""
    return ["--keep-going"] if keep_going else []


def check_folder(
    folder: RunFolder, config: Config, *, resume: bool, data_dir: Path | None = None, options: Sequence[str] = ()
) -> bool:
    """Whether there is a checkpoint to go on from.

    Raises:
        RunError: the folder holds another run, one that is to be resumed, or one of an older format.
    """
    if not folder.exists:
        if folder.path.is_file() or (folder.path.is_dir() and folder.foreign()):
            raise RunError(f"{folder.path} exists and is no run; choose another --out")
        return False
    differences = folder.config().differences(config)
    changed = "; ".join(f"{key} is {old} there and {new} here" for key, (old, new) in differences.items())
    if resume and changed:
        raise RunError(f"{folder.path} cannot be resumed with a changed configuration: {changed}")
    if folder.finished:
        if resume:
            return (folder.path / CHECKPOINT).is_file()
        raise RunError(f"{folder.path} holds a finished run; choose another --out")
    going_on = folder.has_checkpoint()
    if resume:
        return going_on
    if changed:
        raise RunError(f"{folder.path} holds a run of another configuration ({changed}); choose another --out")
    command = resume_command(config, folder.path, data_dir, options)
    raise RunError(f"{folder.path} holds an unfinished run; continue it with: {command}")


def resume_command(config: Config, out: Path, data_dir: Path | None = None, options: Sequence[str] = ()) -> str:
    """What to type to go on: the recipe, what was changed in it, the folder, and other options as they were.

    A function that a file names as its network is named again, since a file alone does not have it called.
    """
    source = config.recipe
    if source not in RECIPES and not Path(source).expanduser().exists():
        source = str(out)  # a run is a recipe itself
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


def read_result(folder: RunFolder, reason: str | None = None) -> Result:
    """The figures of a run, from its records."""
    evaluations: dict[str, dict[str, dict[str, Any]]] = {}
    records = folder.records()
    for record in records:
        if record.get("kind") == "evaluation":
            evaluations.setdefault(record["weights"], {})[record["attack"]] = record
    end: dict[str, Any] = next((record for record in reversed(records) if record.get("kind") == "end"), {})
    return Result(folder.path, reason or end.get("reason", "unfinished"), evaluations, end)


def compare(
    config: Config,
    out: Path,
    place: Place,
    *,
    data_dir: Path | None = None,
    resume: bool = False,
    keep_going: bool = False,
    console: Console | None = None,
) -> tuple[Result, Result]:
    """The same recipe without and with BulletTrain, in ``out``/baseline and ``out``/bullettrain."""
    there = [folder for name in ("baseline", "bullettrain") if (folder := RunFolder(out / name)).exists]
    if there and not resume:
        if len(there) == 2 and all(folder.finished for folder in there):
            raise RunError(f"{out} holds a finished comparison; choose another --out")
        command = resume_command(config, out, data_dir, ["--compare", *_flags(keep_going)])
        raise RunError(f"{out} holds an unfinished comparison; continue it with: {command}")
    run = partial(train, place=place, data_dir=data_dir, resume=resume, keep_going=keep_going, console=console)
    baseline = run(config.baseline(), out / "baseline")
    if not baseline.finished:
        return baseline, baseline
    mined = run(config, out / "bullettrain")
    if mined.finished and place.first:
        RunFolder(out).write_json("comparison.json", comparison(baseline, mined))
    return baseline, mined


def comparison(baseline: Result, mined: Result) -> dict[str, Any]:
    """Both rows, the three speed-ups, and by attack the standard error of the change of accuracy."""
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
    apart = {attack: difference([own[attack]], [plain[attack]]) for attack in plain}
    errors = {attack: {"error": found.error, "paired": found.paired} for attack, found in apart.items()}
    return {"rows": rows, "speedup": speedup, "errors": errors}
