"""`bullettrain bench`: time training steps without and with BulletTrain."""

from __future__ import annotations

from typing import Any

from bullettrain.cli.commands import Bench
from bullettrain.cli.options import check_out
from bullettrain.config.recipes import recipe
from bullettrain.config.settings import ConfigError, number
from bullettrain.formatting import times
from bullettrain.processes import find_place
from bullettrain.run_folder import SHARES, RunFolder
from bullettrain.terminal import logged, percent, say, show_table, terminal
from bullettrain.training import bench as benchmark
from bullettrain.training.setup import load_data


def bench(options: Bench) -> None:
    """Run `bullettrain bench`."""
    console, out = terminal(), options.out
    if out is not None:
        if out.suffix == ".md" or out.is_dir() or out.with_suffix(".md").is_dir():
            raise ConfigError(f"--out {out}: give a JSON file, e.g. x.json; the table is written to x.md")
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
    headings, *figures = zip(*table(result), strict=True)  # one column per case fits a narrow terminal
    show_table(console, headings, [row for row in figures if any(row[1:])])
    for line in [*verdicts(result), *noise_notes(result)]:
        say(console, line)
    if out is not None:
        RunFolder(out.parent).write_json(out.name, result)
        RunFolder(out.parent).write(out.with_suffix(".md").name, (markdown(result) + "\n").encode())
        console.print(f"written  {out}", soft_wrap=True)


def verdicts(result: dict[str, Any]) -> list[str]:
    """Return a sentence for each engine: how much faster or slower BulletTrain is by the clock."""
    sentences = []
    for plain, mined in zip(result["rows"][::2], result["rows"][1::2], strict=True):
        ratio = mined["wall_clock_speedup"]
        clock = f"{times(ratio)} faster" if ratio >= 1 else f"{times(1 / ratio)} slower"
        took = f"{mined['step_ms']:.2f} ms instead of {plain['step_ms']:.2f}"
        sentences.append(f"{plain['engine']}: by the clock BulletTrain is {clock} than its baseline ({took} a step)")
    return sentences


def noise_notes(result: dict[str, Any]) -> list[str]:
    """Return a note for each engine whose timings vary as much as the baseline and BulletTrain differ."""
    notes = []
    for plain, mined in zip(result["rows"][::2], result["rows"][1::2], strict=True):
        gap, spread = abs(plain["step_ms"] - mined["step_ms"]), max(plain["spread_ms"], mined["spread_ms"])
        if spread >= gap:
            vary = f"{plain['engine']}: timings vary by {spread:.2f} ms, and the difference is {gap:.2f} ms"
            notes.append(f"{vary}: too close to tell; give more --steps or --repeats, or keep the machine idle")
    return notes


def table(result: dict[str, Any]) -> list[list[str]]:
    """Return the headings and rows of the table as text."""
    rows = [[_text(name, row) for name in row] for row in result["rows"]]
    return [[name.replace("_", " ") for name in result["rows"][0]], *rows]


def _text(name: str, row: dict[str, Any]) -> str:
    value = row[name]
    if value is None or isinstance(value, str):
        return value or ""
    if name in SHARES:
        return percent(value) if row["boundary"] < 1 else ""  # as of a baseline: every example gets the same steps
    if name.endswith("_speedup"):
        return times(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def markdown(result: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    headings, *rows = (f"| {' | '.join(row)} |" for row in table(result))
    return "\n".join([headings, "|" + "---|" * len(result["rows"][0]), *rows])
