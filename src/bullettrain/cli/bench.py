"""`bullettrain bench`: is it faster here, and by how much."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from bullettrain.terminal import logged, terminal


def bench(
    recipe: Annotated[str, typer.Argument(help="Network, data and method to time.")] = "digits",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe.")
    ] = None,
    engines: Annotated[str, typer.Option(help="Which of eager, graphs, compile. Default: those that run here.")] = "",
    train_steps: Annotated[
        int, typer.Option(min=0, help="Steps of training first, so that the shares are real.")
    ] = 200,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A run, or its weights (.safetensors), to start from instead.")
    ] = None,
    shares: Annotated[
        str | None, typer.Option(help="Impose shares of outlier,boundary,robust, e.g. 0.18,0.28,0.54.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Mini-batches timed at once.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="How often they are timed.")] = 5,
    data_dir: Annotated[Path | None, typer.Option(help="Where datasets lie.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the figures there: .json, and the table beside it as .md.")
    ] = None,
) -> None:
    """Time the baseline and BulletTrain side by side, in every engine that runs here.

    Examples:

      bullettrain bench

      bullettrain bench cifar10-trades-short --engines graphs,compile --out results/bench.json
    """
    from bullettrain.cli.bench_terminal import HEADINGS, cells, markdown
    from bullettrain.config.recipes import recipe as find_recipe
    from bullettrain.config.settings import ConfigError, number
    from bullettrain.processes import find_place
    from bullettrain.run_folder import RunFolder
    from bullettrain.training import bench as benchmark
    from bullettrain.training.setup import load_data

    console = terminal()
    _check(out)
    config = find_recipe(recipe).with_settings(settings or [])
    place = find_place(device)
    names = [name.strip() for name in engines.split(",") if name.strip()]
    if not names:
        names = list(benchmark.ENGINES) if place.device.type == "cuda" else ["eager"]
    fractions = None
    if shares is not None:
        parts = [number(part) for part in shares.split(",")]
        if len(parts) != 3 or not (min(parts) >= 0 and abs(sum(parts) - 1) <= 0.02):
            raise ConfigError(f"--shares {shares}: give three shares that add up to 1, outlier,boundary,robust")
        fractions = (parts[0], parts[1], parts[2])
    with logged(console):
        result = benchmark.bench(
            config,
            place,
            load_data(config, data_dir),
            engines=names,
            train_steps=train_steps,
            steps=steps,
            repeats=repeats,
            shares=fractions,
            checkpoint=checkpoint,
        )
    table = Table(box=None, pad_edge=False, show_header=False)  # a case a column: it fits a narrow terminal
    for index, values in enumerate(zip(HEADINGS.values(), *(cells(row) for row in result["rows"]), strict=True)):
        table.add_row(*values, style="bold" if index < 2 else None)
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)
    if out is not None:
        RunFolder(out.parent).write_json(out.name, result)
        RunFolder(out.parent).write(out.with_suffix(".md").name, (markdown(result) + "\n").encode())
        console.print(f"written  {out}", soft_wrap=True)


def _check(out: Path | None) -> None:
    """Before anything is timed: the figures can be written."""
    from bullettrain.config.settings import ConfigError
    from bullettrain.run_folder import try_folder

    if out is None:
        return
    for file in (out, out.with_suffix(".md")):
        if file.is_dir():
            raise ConfigError(f"--out {out}: {file} is a folder; give a file, e.g. {out / 'bench.json'}")
    if out.suffix == ".md":
        raise ConfigError(
            f"--out {out}: the table goes there; give the file of the figures, {out.with_suffix('.json')}"
        )
    try:
        try_folder(out.parent)
    except OSError as error:
        reason = f"{out.parent} is a file" if out.parent.is_file() else error.strerror
        raise ConfigError(f"--out {out} cannot be written: {reason}; choose another --out") from None
