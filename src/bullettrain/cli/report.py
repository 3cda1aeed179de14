"""`bullettrain report`: write the report of a run again."""

from rich.text import Text

from bullettrain.cli.commands import Report
from bullettrain.config import Config
from bullettrain.config.settings import ConfigError
from bullettrain.reporting.report import write_page
from bullettrain.reporting.run import Contents, read_contents
from bullettrain.run_folder import RunError
from bullettrain.terminal import say, terminal


def report(options: Report) -> None:
    """Run `bullettrain report`."""
    console = terminal()
    contents = read_contents(options.folder)
    problems = _problems(contents)
    path = write_page(contents)
    for problem in problems:
        say(console, Text.assemble(("warning", "bold yellow"), f" {problem}"))
    console.print(f"report  {path}", soft_wrap=True)


def _problems(contents: Contents) -> list[str]:
    """List what cannot be shown. Raises RunError if nothing can be shown."""
    problems: list[str] = []
    empty: list[str] = []
    for run in contents.runs:
        problems += run.notes
        try:
            Config.from_dict(run.config)
        except ConfigError as error:
            problems.append(f"{run.folder / 'config.yaml'} cannot be read: {error}; it is shown as it is")
        if not run.recorded:
            metrics = run.folder / "metrics.jsonl"
            empty.append(f"{metrics} " + ("holds no record that can be read" if metrics.is_file() else "is missing"))
    if empty and not any(run.recorded or run.entries for run in contents.runs):
        raise RunError(f"{contents.folder} has nothing to show: {'; '.join(empty)}")
    return empty + problems
