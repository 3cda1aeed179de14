"""`bullettrain bench`: is it faster here, and by how much."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bullettrain.cli import options
from bullettrain.terminal import logged, show_table, terminal

HEADINGS = {
    "engine": "engine",
    "method": "method",
    "step_ms": "ms/step",
    "spread_ms": "± range",
    "select_ms": "select",
    "attack_ms": "attack",
    "update_ms": "update",
    "epoch_seconds": "s/epoch",
    "examples_per_second": "examples/s",
    "tflops": "TFLOP/s",
    "memory_gib": "GiB",
    "capture_seconds": "capture s",
    "work": "passes",
    "theoretical_speedup": "theoretical ×",
    "work_speedup": "work ×",
    "wall_clock_speedup": "wall-clock ×",
}


def bench(
    recipe: str = "digits",
    *,
    settings: options.Settings = None,
    engines: str = "",
    train_steps: Annotated[int, typer.Option(min=0)] = 200,
    checkpoint: Path | None = None,
    shares: str | None = None,
    steps: options.Count = 40,
    repeats: options.Count = 5,
    data_dir: options.DataDir = None,
    device: options.Device = None,
    out: Path | None = None,
) -> None:
    """Time the baseline and BulletTrain side by side, in every engine that runs here.

    Examples:

      bullettrain bench

      bullettrain bench cifar10-trades-short --engines graphs,compile --out results/bench.json

    Args:
        recipe: Network, data and method to time.
        engines: Which of eager, graphs, compile. Default: those that run here.
        train_steps: Steps of training first, so that the shares are real.
        checkpoint: A run, or its weights (.safetensors), to start from instead.
        shares: Impose shares of outlier,boundary,robust, e.g. 0.18,0.28,0.54.
        steps: Mini-batches timed at once.
        repeats: How often they are timed.
        out: Write the figures there: .json, and the table beside it as .md.
    """
    from bullettrain.config.recipes import recipe as find_recipe
    from bullettrain.config.settings import ConfigError, number
    from bullettrain.processes import find_place
    from bullettrain.run_folder import RunFolder
    from bullettrain.training import bench as benchmark
    from bullettrain.training.setup import load_data

    console = terminal()
    if out is not None:
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
    timed = {"train_steps": train_steps, "steps": steps, "repeats": repeats}
    with logged(console):
        data = load_data(config, data_dir)
        result = benchmark.bench(config, place, data, engines=names, shares=fractions, checkpoint=checkpoint, **timed)
    rows = [list(HEADINGS.values()), *(cells(row) for row in result["rows"])]
    headings, *figures = zip(*rows, strict=True)  # a case a column: it fits a narrow terminal
    show_table(console, headings, figures)
    if out is not None:
        RunFolder(out.parent).write_json(out.name, result)
        RunFolder(out.parent).write(out.with_suffix(".md").name, (markdown(result) + "\n").encode())
        console.print(f"written  {out}", soft_wrap=True)


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text, in the order of the headings."""
    return [_text(row[key]) for key in HEADINGS]


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def markdown(result: dict[str, Any]) -> str:
    """The table as Markdown."""
    lines = ["| " + " | ".join(HEADINGS.values()) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in result["rows"]]
    return "\n".join(lines)


def _check(out: Path) -> None:
    """Before anything is timed: the figures can be written."""
    from bullettrain.config.settings import ConfigError
    from bullettrain.run_folder import try_folder

    for file in (out, out.with_suffix(".md")):
        if file.is_dir():
            raise ConfigError(f"--out {out}: {file} is a folder; give a file, e.g. {out / 'bench.json'}")
    if out.suffix == ".md":
        figures = out.with_suffix(".json")
        raise ConfigError(f"--out {out}: the table goes there; give the file of the figures, {figures}")
    try:
        try_folder(out.parent)
    except OSError as error:
        reason = f"{out.parent} is a file" if out.parent.is_file() else error.strerror
        raise ConfigError(f"--out {out} cannot be written: {reason}; choose another --out") from None
