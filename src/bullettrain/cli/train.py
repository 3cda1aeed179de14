"""`bullettrain train`: one command to a robust model."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bullettrain.cli import options
from bullettrain.terminal import logged, say, say_interrupted, terminal

if TYPE_CHECKING:
    from bullettrain.processes import Place


def train(
    recipe: str = "digits",
    *,
    data: str | None = None,
    network: str | None = None,
    epochs: int | None = None,
    minutes: Annotated[float | None, typer.Option(min=0.01)] = None,
    batch_size: int | None = None,
    lr: options.Number = None,
    eps: options.Number = None,
    settings: options.Settings = None,
    out: Path | None = None,
    data_dir: options.DataDir = None,
    resume: bool = False,
    seed: int | None = None,
    device: options.Device = None,
    method: str | None = None,
    baseline: bool = False,
    compare: bool = False,
    cache_dir: Path | None = None,
    compile_: options.Compile = False,
    accumulate: int | None = None,
    trust: options.Trust = False,
    keep_going: bool = False,
    list_: bool = False,
    show: bool = False,
) -> None:
    """Train a robust network.

    Without arguments: handwritten digits that come with scikit-learn, on the CPU, in about a minute.

    Examples:

      bullettrain train

      bullettrain train --compare

      bullettrain train cifar10-trades-short --epochs 10 --eps 4/255 --set weight_decay=1e-4

      bullettrain train cifar10-trades-short --minutes 10

      bullettrain train cifar10-trades-short --method fast

      bullettrain train cifar10-trades-short --data folder:my-images --set data.image_size=32

      bullettrain train cifar10-trades-short --show > my.yaml; bullettrain train my.yaml

      bullettrain train runs/digits --resume

      torchrun --nproc-per-node 2 -m bullettrain train cifar10-trades

    Args:
        recipe: What to train: a recipe (--list shows them), a YAML file as --show prints, or a run's folder.
        data: digits, mnist, cifar10, cifar100, folder:PATH or npz:PATH.
        network: small-cnn, preact-resnet-18, wrn-D-W, package.module:function or timm:NAME.
        epochs: Passes over the training images.
        minutes: Instead of --epochs: as many as the whole command does in this time.
        batch_size: Images in a mini-batch, over all processes together.
        lr: Learning rate.
        eps: Radius of the attack, e.g. 8/255.
        out: Folder of the run. Default: runs/RECIPE; to resume a run's folder, that folder.
        resume: Go on where the run in --out was stopped.
        seed: Seed of everything random.
        method: Train by a baseline instead: fast, fast-3, n-fgsm, yopo-2-5, grad-align, free-8.
        baseline: The full number of steps for everyone: no BulletTrain.
        compare: Train without and with BulletTrain, and put both in one table.
        cache_dir: Keep compiled code here, so that the next run need not compile it again.
        accumulate: Mini-batches to one update of the weights.
        keep_going: Warn of a collapse, but do not stop.
        list_: Show the recipes and stop.
        show: Print the settings as YAML and stop.
    """
    from bullettrain import processes
    from bullettrain.cli import train_terminal as told
    from bullettrain.config.describe import as_yaml
    from bullettrain.config.methods import with_method
    from bullettrain.run_folder import RunError, RunFolder
    from bullettrain.training.recipe_files import find_recipe
    from bullettrain.training.run import resume_command

    began, console = time.monotonic(), terminal()
    if list_:
        told.show_list(console)
        return
    options.check_apart(method=method, baseline=baseline, compare=compare)
    for other, value in {"epochs": epochs, "resume": resume, "compare": compare}.items():
        options.check_apart(minutes=minutes, **{other: value})
    changes: dict[str, object] = {"network.name": network, "data.name": data, "method.eps": eps, "optimizer.lr": lr}
    training = {"epochs": epochs, "batch_size": batch_size, "seed": seed, "accumulate": accumulate}
    changes |= {f"training.{name}": value for name, value in {**training, "compile": compile_ or None}.items()}
    settings = [*(settings or ()), *(f"{key}={value}" for key, value in changes.items() if value is not None)]
    named = [setting.partition("=")[2].strip() for setting in settings if setting.startswith("network.name=")]
    config = find_recipe(recipe, network=named[-1] if named else None, trust=trust)
    config = (with_method(config, method) if method else config).with_settings(settings)
    config = config.baseline() if baseline else config
    if show:
        print(as_yaml(config), end="")
        return
    kind = method or ("compare" if compare else "baseline" if baseline else "")
    name = "-".join(filter(None, (re.sub(r"\.ya?ml$", "", Path(recipe).resolve().name), kind)))
    parts = {"baseline": config.baseline(), "bullettrain": config} if compare else {"": config}
    if resume and out is None and RunFolder(Path(recipe)).exists:
        out = Path(recipe)
    folder = out or told.default_folder(name, parts, resume=resume)
    if resume and not folder.is_dir():
        raise RunError(f"{folder} is not there, so there is nothing to resume; check --out, or leave out --resume")
    if cache_dir is not None:
        cache_compiled_code(cache_dir)
    again = ["--device", device] if device else []
    again += ["--cache-dir", str(cache_dir)] if cache_dir else []
    again += ["--compare"] * compare + ["--keep-going"] * keep_going
    place: Place | None = None
    try:
        place = processes.find_place(device)
        with logged(console):
            if minutes is not None:
                config = told.fit_minutes(config, minutes, place, data_dir, folder, began=began)
            how = {"data_dir": data_dir, "resume": resume, "keep_going": keep_going}
            told.run(console, config, folder, place, how, both=compare, again=again)
    except KeyboardInterrupt:  # before it trains, or a second one: at once, with what was saved before
        if place is not None and not place.first:
            raise
        if any(RunFolder(folder / part).exists for part in parts):
            say_interrupted(console, resume_command(config, folder, data_dir, again), "go on with")
        say(console, "interrupted before the first step; nothing was saved")
        raise
    processes.leave_group()  # nobody leaves while the first one still writes


def cache_compiled_code(folder: Path) -> None:
    """Have PyTorch keep compiled code in ``folder``; before anything is compiled."""
    for variable, part in {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}.items():
        os.environ[variable] = str(folder.expanduser().resolve() / part)
