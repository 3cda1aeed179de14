"""`bullettrain data`: what there is, whether it is right, and how to get it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from bullettrain.cli.options import Device
from bullettrain.terminal import say_rows, terminal

if TYPE_CHECKING:
    from torch import Tensor

    from bullettrain.corruptions.make import Progress as Told

data_app = typer.Typer(
    help="Datasets: list, prepare, verify, corrupt.",
    epilog="Example:  bullettrain data prepare cifar10",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
NAMES = "mnist, cifar10, cifar100"
SMALL = ("cifar10", "cifar100")  # what the corruptions' parameters are for
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
    from bullettrain import data as datasets

    root = datasets.root(data_dir)
    _say(f"looked for in {root}")
    rows = []
    for entry in datasets.available(root):
        lacking = [str(path.relative_to(root)) for path in entry.missing]
        said = f", no {lacking[0]}{' …' * (len(lacking) > 1)}" if lacking else ""
        rows.append((Text(entry.name, "bold"), entry.state, entry.title + said))
    say_rows(terminal(), rows)


@data_app.command()
def prepare(name: Annotated[str, typer.Argument(help=NAMES)], data_dir: Where = None) -> None:
    """Fetch a dataset from its official source, checked; or unpack a file that you put there.

    Example:

      bullettrain data prepare cifar10
    """
    from bullettrain import data as datasets

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
    from bullettrain import data as datasets

    _known(name)
    results = datasets.verify(name, datasets.root(data_dir))
    for result in results:  # a line each, never cut: the file's name is what matters
        state = (f"{result.state:12}", "green" if result.ok else "red")
        _say(Text.assemble(state, f"{result.path}  {result.detail}"))
    if not all(result.ok for result in results):
        raise typer.Exit(2)


@data_app.command()
def corrupt(
    out: Annotated[Path, typer.Option(help="Folder for the files; existing files are kept.")],
    dataset: Annotated[str, typer.Option(help=f"Whose test images: {' or '.join(SMALL)}.")] = "cifar10",
    data_dir: Where = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="NAME", help="Only this corruption; repeatable, or several separated by commas."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random parts.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Number of processes. Default: one per core.")] = None,
    device: Device = None,
) -> None:
    """Make CIFAR-10-C or CIFAR-100-C: the test images under 19 common corruptions, at 5 severities.

    Examples:

      bullettrain data corrupt --dataset cifar10 --out CIFAR-10-C

      bullettrain data corrupt --dataset cifar100 --out CIFAR-100-C --only fog,snow
    """
    from bullettrain import corruptions
    from bullettrain import data as datasets
    from bullettrain.config.settings import ConfigError
    from bullettrain.corruptions.files import image_file
    from bullettrain.processes import find_place

    if dataset not in SMALL:
        raise ConfigError(f"--dataset is {dataset!r}; corruptions are made of {' and '.join(SMALL)}")
    names = _corruptions(only)
    place = find_place(device).device
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"corruptions need double precision, which {place.type} lacks; use --device cpu")
    root = datasets.root(data_dir)
    images = datasets.load(dataset, split="test", root=root)
    missed: datasets.DataError | None = None
    overlays: Sequence[Tensor] = ()
    if "frost" in names and not image_file(out, "frost").exists():
        try:
            overlays = corruptions.read_overlays(root / "frost")
        except datasets.DataError as error:  # the others are made first; the command still fails
            missed = error
            names.remove("frost")
            if not names:
                raise
    severities = corruptions.SEVERITIES
    what = f"{len(names)} corruption{'s' if len(names) > 1 else ''} at {severities} severities"
    _say(f"{len(images)} test images of {dataset} on {place}, {what}: {out}")
    todo = sum(not image_file(out, name).exists() for name in names)
    with _making(todo * severities * len(images)) as progress:
        made = corruptions.make(
            images, out, names, seed=seed, jobs=jobs or _cores(), device=place, overlays=overlays, progress=progress
        )
    kept = len(names) - len(made)
    _say(f"{len(made)} made" + (f", {kept} were there" if kept else "") + f": {out}")
    if missed is not None:
        raise missed


def _corruptions(only: list[str] | None) -> list[str]:
    """The corruptions that are asked for, each once; all of them, where none is."""
    from bullettrain.config.settings import ConfigError
    from bullettrain.corruptions import CORRUPTIONS
    from bullettrain.validation import instead

    asked = [name.strip() for text in only or () for name in text.split(",") if name.strip()]
    there = tuple(CORRUPTIONS)
    for name in asked:
        if name not in there:
            raise ConfigError(f"there is no corruption {name!r}{instead(name, there)}")
    return [name for name in there if name in asked or not asked]


@contextmanager
def _making(images: int) -> Iterator[Told]:
    """How far it is: a bar over all ``images`` on a terminal, and everywhere a line for each file that is made."""
    from bullettrain.progress import progress_bar

    console = terminal()
    bar = progress_bar(console, transient=True, percent=True)
    bar.disable = not console.is_terminal
    with bar:
        task = bar.add_task("starting", total=images)
        before = 0

        def update(name: str, done: int, total: int) -> None:
            nonlocal before
            bar.update(task, description=name, completed=before + done)
            if done == total:
                before += total
                console.print(f"{name}.npy")

        yield update


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _say(text: str | Text) -> None:
    terminal().print(text, soft_wrap=True)


def _known(name: str) -> None:
    from bullettrain import data as datasets

    if name == "digits":
        raise datasets.DataError("digits comes with scikit-learn; there is nothing to fetch or verify")
    if name not in datasets.SOURCES:
        raise datasets.DataError(f"there is no dataset {name!r} to fetch; there are {NAMES}")
