"""`bullettrain report`: make a run's report again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from bullettrain.reporting import read_run, write_report
from bullettrain.reporting.judged import read_judged
from bullettrain.terminal import say, terminal
from bullettrain.training.folder import RunError, RunFolder


def report(folder: Annotated[Path, typer.Argument(help="Folder of a run, or of a comparison.")]) -> None:
    """Write report.html into a run's folder again, from what the run recorded.

    Example:

      bullettrain report runs/digits
    """
    console = terminal()
    try:
        problems = _problems(folder)
        path = write_report(folder)
    except ValueError as error:
        raise RunError(str(error)) from None
    except OSError as error:
        raise RunError(f"report.html could not be written to {folder}: {error.strerror}") from None
    for problem in problems:
        say(console, Text.assemble(("warning", "bold yellow"), f" {problem}"))
    console.print(f"report  {path}", soft_wrap=True)


def _problems(folder: Path) -> list[str]:
    """What of the folder cannot be shown; RunError where that is all of it."""
    compared = (folder / "comparison.json").is_file()
    runs = [folder / name for name in ("bullettrain", "baseline")] if compared else [folder]
    problems, empty, shown = [], [], False
    for path in (path for path in runs if RunFolder(path).exists):
        entries, damaged = read_judged(path)
        problems += [*read_run(path).notes, *damaged]
        try:
            RunFolder(path).config()
        except RunError as error:
            problems.append(f"{error}; it is shown as it is")
        if any(record.get("kind") for record in RunFolder(path).records()):
            shown = True
        else:
            metrics = path / "metrics.jsonl"
            empty.append(f"{metrics} " + ("holds no record that can be read" if metrics.is_file() else "is missing"))
            shown = shown or bool(entries)
    if empty and not shown:
        raise RunError(f"{folder} has nothing to show: {'; '.join(empty)}")
    return empty + problems
