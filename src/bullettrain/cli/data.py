"""`bullettrain data`: what there is, whether it is right, and how to get it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from bullettrain.cli import options
from bullettrain.cli.command import add_command
from bullettrain.terminal import say_rows, terminal

if TYPE_CHECKING:
    from torch import Tensor

data_app = typer.Typer(
    help="Datasets: list, prepare, verify, corrupt.",
    epilog="Example:  bullettrain data prepare cifar10",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
SMALL = ("cifar10", "cifar100")  # what the corruptions' parameters are for
Name = Annotated[str, typer.Argument(help="mnist, cifar10, cifar100")]


def list_datasets(*, data_dir: options.DataDir = None) -> None:
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


def prepare(name: Name, *, data_dir: options.DataDir = None) -> None:
    """Fetch a dataset from its official source, checked; or unpack a file that you put there.

    Example:

      bullettrain data prepare cifar10
    """
    from bullettrain import data as datasets

    _check_digits(name)
    root = datasets.root(data_dir)
    with datasets.progress_bar() as progress:
        datasets.prepare(name, root, progress=progress)
    _say(f"{name} is ready in {root}")


def verify(name: Name, *, data_dir: options.DataDir = None) -> None:
    """Check a dataset's files against the digests of the originals.

    Example:

      bullettrain data verify cifar10
    """
    from bullettrain import data as datasets

    _check_digits(name)
    results = datasets.verify(name, datasets.root(data_dir))
    for result in results:  # a line each, never cut: the file's name is what matters
        state = (f"{result.state:12}", "green" if result.ok else "red")
        _say(Text.assemble(state, f"{result.path}  {result.detail}"))
    if not all(result.ok for result in results):
        raise typer.Exit(2)


def corrupt(
    *,
    out: Path,
    dataset: str = "cifar10",
    data_dir: options.DataDir = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="NAME")] = None,
    seed: int = 0,
    jobs: Annotated[int | None, typer.Option(min=1)] = None,
    device: options.Device = None,
) -> None:
    """Make CIFAR-10-C or CIFAR-100-C: the test images under 19 common corruptions, at 5 severities.

    Examples:

      bullettrain data corrupt --dataset cifar10 --out CIFAR-10-C

      bullettrain data corrupt --dataset cifar100 --out CIFAR-100-C --only fog,snow

    Args:
        out: Folder for the files; existing files are kept.
        dataset: Whose test images: cifar10 or cifar100.
        only: Only this corruption; repeatable, or several separated by commas.
        seed: Seed of the random parts.
        jobs: Number of processes. Default: one per core.
    """
    from bullettrain import corruptions
    from bullettrain import data as datasets
    from bullettrain.config.settings import ConfigError
    from bullettrain.corruptions.files import image_file
    from bullettrain.processes import find_place
    from bullettrain.progress import progress_bar

    options.check_known("--dataset is", dataset, SMALL)
    asked = [name.strip() for text in only or () for name in text.split(",") if name.strip()]
    for name in asked:
        options.check_known("there is no corruption", name, corruptions.CORRUPTIONS)
    names = [name for name in corruptions.CORRUPTIONS if name in asked or not asked]
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
    console, files = terminal(), list[str]()
    left = sum(not image_file(out, name).exists() for name in names)
    bar = progress_bar(console, transient=True, percent=True)
    bar.disable = not console.is_terminal
    task = bar.add_task("starting", total=left * severities * len(images))

    def progress(name: str, done: int, total: int) -> None:
        bar.update(task, description=name, completed=len(files) * total + done)
        if done == total:
            files.append(name)
            console.print(f"{name}.npy")

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    how = {"seed": seed, "jobs": jobs or cores}
    with bar:
        made = corruptions.make(images, out, names, device=place, overlays=overlays, progress=progress, **how)
    kept = len(names) - len(made)
    _say(f"{len(made)} made" + (f", {kept} were there" if kept else "") + f": {out}")
    if missed is not None:
        raise missed


def _say(text: str | Text) -> None:
    terminal().print(text, soft_wrap=True)


def _check_digits(name: str) -> None:
    from bullettrain import data as datasets

    if name == "digits":
        raise datasets.DataError("digits comes with scikit-learn; there is nothing to fetch or verify")


add_command(data_app, list_datasets, "list")
add_command(data_app, prepare)
add_command(data_app, verify)
add_command(data_app, corrupt)
