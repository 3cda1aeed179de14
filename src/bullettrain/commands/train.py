"""`bullettrain train`: one command to a robust model."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bullettrain.terminal import logged, say, terminal

if TYPE_CHECKING:
    from bullettrain.processes import Place


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="What to train: a recipe (--list shows them), a YAML file as --show prints, or a run's folder."
        ),
    ] = "digits",
    data: Annotated[str | None, typer.Option(help="digits, mnist, cifar10, cifar100, folder:PATH or npz:PATH.")] = None,
    network: Annotated[
        str | None,
        typer.Option(help="small-cnn, preact-resnet-18, wrn-D-W, package.module:function or timm:NAME."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training images.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Instead of --epochs: as many as the whole command does in this time.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images in a mini-batch, over all processes together.")] = None,
    lr: Annotated[str | None, typer.Option("--lr", metavar="NUMBER", help="Learning rate.")] = None,
    eps: Annotated[
        str | None,
        typer.Option("--eps", metavar="NUMBER", help="Radius of the attack, e.g. 8/255."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change another setting; again for more. --show lists them.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the run. Default: runs/RECIPE; to resume a run's folder, that folder."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where datasets lie. Default: $BULLETTRAIN_DATA, then the user's cache.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in --out was stopped.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: a GPU where there is one.")] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Train by a baseline instead: fast, fast-3, n-fgsm, yopo-2-5, gat, …; --list has all."),
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="The full number of steps for everyone: no BulletTrain.")
    ] = False,
    compare_both: Annotated[
        bool, typer.Option("--compare", help="Train without and with BulletTrain, and put both in one table.")
    ] = False,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Keep compiled code here, so that the next run need not compile it again.")
    ] = None,
    compile_network: Annotated[bool, typer.Option("--compile", help="Compile the network with torch.compile.")] = False,
    accumulate: Annotated[int | None, typer.Option(help="Mini-batches to one update of the weights.")] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Import and call the function that a file or run names as its network.")
    ] = False,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Warn of a collapse, but do not stop.")] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="Show the recipes and stop.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the settings as YAML and stop.")] = False,
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
    """
    from bullettrain import processes
    from bullettrain.commands import train_terminal as told
    from bullettrain.config import RECIPES, ConfigError
    from bullettrain.config.describe import as_yaml
    from bullettrain.config.methods import with_method
    from bullettrain.run_folder import RunError, RunFolder
    from bullettrain.training.recipe_files import find_recipe
    from bullettrain.training.run import resume_command

    began, console = time.monotonic(), terminal()
    if list_recipes:
        told.show_list(console)
        return
    settings = list(settings or [])
    named = [setting.partition("=")[2].strip() for setting in settings if setting.startswith("network.name=")]
    config = find_recipe(recipe, network=network or (named[-1] if named else None), trust=trust)
    shortcuts = {"data.name": data, "epochs": epochs, "training.batch_size": batch_size, "lr": lr, "eps": eps}
    settings += [f"{key}={value}" for key, value in shortcuts.items() if value is not None]
    if method is not None:
        if baseline or compare_both:
            raise ConfigError(
                f"--method {method} gives everyone the same steps; leave out --baseline and --compare, or --method"
            )
        config = with_method(config, method)
    config = config.with_settings(settings)
    options = {"seed": seed, "accumulate": accumulate, "compile": compile_network or None}
    config = config.replace_section("training", **{key: value for key, value in options.items() if value is not None})
    if baseline and compare_both:
        raise ConfigError("--baseline and --compare were both given; --compare trains the baseline too")
    if minutes is not None and (resume or compare_both or epochs is not None or minutes <= 0):
        raise ConfigError(
            f"--minutes {minutes:g} chooses the epochs of one new run, and is above 0; leave out --epochs, --resume "
            "and --compare, or --minutes"
        )
    if baseline:
        config = config.baseline()
    if show:
        print(as_yaml(config), end="")
        return
    name = recipe if recipe in RECIPES else Path(recipe).resolve().name.removesuffix(".yaml").removesuffix(".yml")
    name += (f"-{method}" if method else "") + ("-compare" if compare_both else "-baseline" if baseline else "")
    parts = {"baseline": config.baseline(), "bullettrain": config} if compare_both else {"": config}
    if resume and out is None and RunFolder(Path(recipe)).exists:
        out = Path(recipe)
    folder = out or told.default_folder(name, parts, resume=resume)
    if resume and not folder.is_dir():
        raise RunError(f"{folder} is not there, so there is nothing to resume; check --out, or leave out --resume")
    again = ["--device", device] if device else []
    again += ["--cache-dir", str(cache_dir)] if cache_dir else []
    again += ["--compare"] if compare_both else []
    again += ["--keep-going"] if keep_going else []
    if cache_dir is not None:
        cache_compiled_code(cache_dir)
    place: Place | None = None
    try:
        place = processes.find_place(device)
        how: dict[str, Any] = {"data_dir": data_dir, "resume": resume, "keep_going": keep_going}
        with logged(console):
            if minutes is not None:
                config = told.fit_minutes(config, minutes, place, data_dir, folder, began=began)
            told.run(console, config, folder, place, how, both=compare_both, again=again)
    except KeyboardInterrupt:  # before it trains, or a second one: at once, with what was saved before
        if place is None or place.first:
            if any(RunFolder(path).exists for path in (folder, folder / "baseline")):
                told.say_how_to_go_on(console, resume_command(config, folder, data_dir, again))
            else:
                say(console, "interrupted before the first step; nothing was saved")
        raise
    processes.leave_group()  # nobody leaves while the first one still writes


def cache_compiled_code(folder: Path) -> None:
    """Have PyTorch keep compiled code in ``folder``; before anything is compiled."""
    for variable, part in {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}.items():
        os.environ[variable] = str(folder.expanduser().resolve() / part)
