"""`bullettrain data`: what there is, whether it is right, and how to get it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bullettrain import data as datasets

data_app = typer.Typer(help="Datasets: list, prepare, verify.", no_args_is_help=True, rich_markup_mode="rich")
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
    console, root = Console(), datasets.root(data_dir)
    table = Table.grid(padding=(0, 2))
    for entry in datasets.available(root):
        note = ", ".join(str(path) for path in entry.missing[:1]) + (" …" if len(entry.missing) > 1 else "")
        table.add_row(f"[bold]{entry.name}[/]", entry.state, escape(entry.title), escape(f"no {note}" if note else ""))
    console.print(f"looked for in {root}", highlight=False, soft_wrap=True)
    console.print(table)


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
    Console().print(f"{name} is ready in {root}", highlight=False, soft_wrap=True)


@data_app.command()
def verify(name: Annotated[str, typer.Argument(help=NAMES)], data_dir: Where = None) -> None:
    """Check a dataset's files against the digests of the originals.

    Example:

      bullettrain data verify cifar10
    """
    _known(name)
    results = datasets.verify(name, datasets.root(data_dir))
    table = Table.grid(padding=(0, 2))
    for result in results:
        colour = "green" if result.ok else "red"
        table.add_row(f"[{colour}]{result.state}[/]", escape(str(result.path)), escape(result.detail))
    Console().print(table)
    if not all(result.ok for result in results):
        raise typer.Exit(2)


def _known(name: str) -> None:
    if name not in datasets.SOURCES:
        raise datasets.DataError(f"there is no dataset {name!r} to fetch; there are {NAMES}")
