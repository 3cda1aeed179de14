"""`bullettrain bench`: is it faster here, and by how much."""

from __future__ import annotations

from typing import Any

from bullettrain.cli.commands import Bench
from bullettrain.cli.options import check_out
from bullettrain.config.recipes import recipe
from bullettrain.config.settings import ConfigError, number
from bullettrain.processes import find_place
from bullettrain.run_folder import RunFolder
from bullettrain.terminal import logged, show_table, terminal
from bullettrain.training import bench as benchmark
from bullettrain.training.setup import load_data


def bench(options: Bench) -> None:
    """Run the command."""
    console, out = terminal(), options.out
    if out is not None:
        if out.suffix == ".md" or out.is_dir() or out.with_suffix(".md").is_dir():
            raise ConfigError(f"--out {out}: give a file for the figures, as x.json; their table goes to x.md")
        check_out(out.parent)
    config = recipe(options.recipe).with_settings(options.settings or [])
    place = find_place(options.device)
    engines = [name.strip() for name in options.engines.split(",") if name.strip()]
    if not engines:
        engines = list(benchmark.ENGINES) if place.device.type == "cuda" else ["eager"]
    shares = [number(part) for part in options.shares.split(",")] if options.shares is not None else []
    if options.shares is not None and (len(shares) != 3 or not (min(shares) >= 0 and abs(sum(shares) - 1) <= 0.02)):
        raise ConfigError(f"--shares {options.shares}: give three shares that add up to 1, outlier,boundary,robust")
    with logged(console):
        result = benchmark.bench(
            config,
            place,
            load_data(config, options.data_dir),
            engines=engines,
            train_steps=options.train_steps,
            steps=options.steps,
            repeats=options.repeats,
            shares=(shares[0], shares[1], shares[2]) if shares else None,
            checkpoint=options.checkpoint,
        )
    headings, *figures = zip(*table(result), strict=True)  # a case a column: it fits a narrow terminal
    show_table(console, headings, [row for row in figures if any(row[1:])])
    if out is not None:
        RunFolder(out.parent).write_json(out.name, result)
        RunFolder(out.parent).write(out.with_suffix(".md").name, (markdown(result) + "\n").encode())
        console.print(f"written  {out}", soft_wrap=True)


def table(result: dict[str, Any]) -> list[list[str]]:
    """The figures as text, below their names."""
    rows = [[_text(value) for value in row.values()] for row in result["rows"]]
    return [[name.replace("_", " ") for name in result["rows"][0]], *rows]


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def markdown(result: dict[str, Any]) -> str:
    """The table as Markdown."""
    headings, *rows = (f"| {' | '.join(row)} |" for row in table(result))
    return "\n".join([headings, "|" + "---|" * len(result["rows"][0]), *rows])
