"""`bullettrain data`: what there is, whether it is right, and how to get it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from bullettrain import data as datasets

data_app = typer.Typer(
    help="Datasets: list, prepare, verify.",
    epilog="Example:  bullettrain data prepare cifar10",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
NAMES = ", ".join(datasets.SOURCES)
Where = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Where datasets lie. Default: $BULLETTRAIN_DATA, then the user's cache."),
]


@data_app.command("list")
def list_datasets(data_dir: Where = None) -> None:
    """Show the datasets, and which of them are here.

    Example:

      bullettrain data list
    """
    root = datasets.root(data_dir)
    _say(f"looked for in {root}")
    for entry in datasets.available(root):
        lacking = f", no {entry.missing[0]}" + (" …" if len(entry.missing) > 1 else "") if entry.missing else ""
        _say(f"[bold]{entry.name:10}[/]{entry.state:12}{escape(entry.title + lacking)}")


@data_app.command()
def prepare(name: Annotated[str, typer.Argument(help=NAMES)], data_dir: Where = None) -> None:
    """Fetch a dataset from its official source, checked; or unpack a file that you put there.

    Example:

      bullettrain data prepare cifar10
    """
    _known(name)
    root = datasets.root(data_dir)
    with datasets.progress_bar() as progress:
        datasets.prepare(name, root, progress=progress)
    _say(f"{name} is ready in {root}")


@data_app.command()
def verify(name: Annotated[str, typer.Argument(help=NAMES)], data_dir: Where = None) -> None:
    """Check a dataset's files against the digests of the originals.

    Example:

      bullettrain data verify cifar10
    """
    _known(name)
    results = datasets.verify(name, datasets.root(data_dir))
    for result in results:  # a line each, never cut: the file's name is what matters
        _say(f"[{'green' if result.ok else 'red'}]{result.state:12}[/]{escape(f'{result.path}  {result.detail}')}")
    if not all(result.ok for result in results):
        raise typer.Exit(2)


def _say(text: str) -> None:
    Console().print(text, highlight=False, soft_wrap=True)


def _known(name: str) -> None:
    if name == "digits":
        raise datasets.DataError("digits comes with scikit-learn; there is nothing to fetch or verify")
    if name not in datasets.SOURCES:
        raise datasets.DataError(f"there is no dataset {name!r} to fetch; there are {NAMES}")
