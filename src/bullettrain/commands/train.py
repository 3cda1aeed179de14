"""`bullettrain train`: one command to a robust model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bullettrain.terminal import say, terminal

if TYPE_CHECKING:
    from bullettrain.training.setup import Place


def train(
    recipe: Annotated[str, typer.Argument(help="What to train; --list shows the recipes.")] = "digits",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a setting of the recipe; again for more. --show lists them."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/RECIPE.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where datasets lie. Default: $BULLETTRAIN_DATA, then the user's cache.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in --out was stopped.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: a GPU where there is one.")] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Train by a baseline instead: fast, fast-3, n-fgsm, yopo-2-5, grad-align, free-8."),
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="The full number of steps for everyone: no BulletTrain.")
    ] = False,
    compare_both: Annotated[
        bool, typer.Option("--compare", help="Train without and with BulletTrain, and put both in one table.")
    ] = False,
    compile_network: Annotated[bool, typer.Option("--compile", help="Compile the network with torch.compile.")] = False,
    accumulate: Annotated[int | None, typer.Option(help="Mini-batches to one update of the weights.")] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Warn of a collapse, but do not stop.")] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="Show the recipes and stop.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the settings as YAML and stop.")] = False,
) -> None:
    """Train a robust network.

    Without arguments: handwritten digits that come with scikit-learn, on the CPU, in under a minute.

    Examples:

      bullettrain train

      bullettrain train --compare

      bullettrain train cifar10-trades-short --set epochs=10 --set eps=4/255

      bullettrain train cifar10-trades-short --method fast

      bullettrain train cifar10-trades-short --set data.name=folder:my-images --set data.image_size=32

      torchrun --nproc-per-node 2 -m bullettrain train cifar10-trades
    """
    import yaml

    from bullettrain.commands import train_terminal as told
    from bullettrain.training import setup
    from bullettrain.training.folder import RunError, RunFolder
    from bullettrain.training.methods import with_method
    from bullettrain.training.recipes import RECIPES
    from bullettrain.training.recipes import recipe as find_recipe
    from bullettrain.training.run import resume_command
    from bullettrain.training.settings import ConfigError

    console = terminal()
    if list_recipes:
        told.show_list(console)
        return
    if recipe not in RECIPES and RunFolder(Path(recipe)).exists:
        raise ConfigError(f"{recipe} is a run; to go on with it, give its recipe and --out {recipe} --resume")
    config = find_recipe(recipe)
    if method is not None:
        if baseline or compare_both:
            raise ConfigError(
                f"--method {method} gives everyone the same steps; leave out --baseline and --compare, or --method"
            )
        config = with_method(config, method)
    config = config.with_settings(settings or [])
    options = {"seed": seed, "accumulate": accumulate, "compile": compile_network or None}
    config = config.replace_section("training", **{key: value for key, value in options.items() if value is not None})
    if baseline and compare_both:
        raise ConfigError("--baseline and --compare were both given; --compare trains the baseline too")
    if baseline:
        config = config.baseline()
    if show:
        print(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True), end="")
        return
    name = recipe + (f"-{method}" if method else "") + ("-compare" if compare_both else "-baseline" if baseline else "")
    parts = {"baseline": config.baseline(), "bullettrain": config} if compare_both else {"": config}
    folder = out or told.default_folder(name, parts, resume=resume)
    if resume and not folder.is_dir():
        raise RunError(f"{folder} is not there, so there is nothing to resume; check --out, or leave out --resume")
    again = ["--device", device] if device else []
    again += ["--compare"] if compare_both else []
    again += ["--keep-going"] if keep_going else []
    place: Place | None = None
    try:
        place = setup.find_place(device)
        told.run(console, config, folder, place, data_dir, resume, keep_going, compare_both, again)
    except KeyboardInterrupt:  # before it trains, or a second one: at once, with what was saved before
        if place is None or place.first:
            if any(RunFolder(path).exists for path in (folder, folder / "baseline")):
                told.say_how_to_go_on(console, resume_command(config, folder, data_dir, again))
            else:
                say(console, "interrupted before the first step; nothing was saved")
        raise
    setup.leave_group()  # nobody leaves while the first one still writes
