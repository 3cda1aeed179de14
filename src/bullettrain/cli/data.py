"""`bullettrain data`: list, download, verify and corrupt datasets."""

from __future__ import annotations

import os
from collections.abc import Sequence

import typer
from rich.text import Text
from torch import Tensor

from bullettrain import corruptions
from bullettrain import data as datasets
from bullettrain.cli.commands import DataCorrupt, DataList, DataPrepare, DataVerify
from bullettrain.config.settings import ConfigError
from bullettrain.corruptions.files import image_file
from bullettrain.data.base import prepare_command
from bullettrain.formatting import plural
from bullettrain.processes import find_place
from bullettrain.progress import progress_bar
from bullettrain.terminal import say_rows, terminal
from bullettrain.validation import check_known

CORRUPTIBLE = ("cifar10", "cifar100")  # the parameters of the corruptions are for these


def list_datasets(options: DataList) -> None:
    """Run `bullettrain data list`."""
    root = datasets.root(options.data_dir)
    _say(f"datasets in {root}")
    rows = []
    for entry in datasets.available(root):
        note = f"; get it with: {prepare_command(entry.name, root)}" if entry.missing else ""
        rows.append((Text(entry.name, "bold"), entry.state, entry.title + note))
    say_rows(terminal(), rows)


def prepare(options: DataPrepare) -> None:
    """Run `bullettrain data prepare`."""
    _check_digits(options.name)
    root = datasets.root(options.data_dir)
    with datasets.progress_bar() as progress:
        datasets.prepare(options.name, root, progress=progress)
    _say(f"{options.name} is ready in {root}")


def verify(options: DataVerify) -> None:
    """Run `bullettrain data verify`."""
    _check_digits(options.name)
    root = datasets.root(options.data_dir)
    results = datasets.verify(options.name, root)
    for result in results:  # one unwrapped line each
        state = (f"{result.state:12}", "green" if result.ok else "red")
        _say(Text.assemble(state, f"{result.path}  {result.detail}"))
    if not all(result.ok for result in results):
        _say(f"download what is missing or wrong with: {prepare_command(options.name, root)}")
        raise typer.Exit(2)


def corrupt(options: DataCorrupt) -> None:
    """Run `bullettrain data corrupt`."""
    out, dataset = options.out, options.dataset
    check_known(dataset, CORRUPTIBLE, "--dataset is", error=ConfigError)
    only = [name.strip() for text in options.only or () for name in text.split(",") if name.strip()]
    for name in only:
        check_known(name, corruptions.CORRUPTIONS, "there is no corruption", error=ConfigError)
    names = [name for name in corruptions.CORRUPTIONS if name in only or not only]
    place = find_place(options.device).device
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"corruptions need double precision, which {place.type} lacks; use --device cpu")
    root = datasets.root(options.data_dir)
    images = datasets.load(dataset, split="test", root=root)
    failure: datasets.DataError | None = None
    overlays: Sequence[Tensor] = ()
    if "frost" in names and not image_file(out, "frost").exists():
        try:
            overlays = corruptions.read_overlays(root / "frost")
        except datasets.DataError as error:  # raised after the other corruptions are made
            failure = error
            names.remove("frost")
            if not names:
                raise
    severities = corruptions.SEVERITIES
    what = f"{len(names)} {plural('corruption', len(names))} at {severities} severities"
    _say(f"{len(images)} test images of {dataset} on {place}, {what}: {out}")
    console, files = terminal(), list[str]()
    remaining = sum(not image_file(out, name).exists() for name in names)
    bar = progress_bar(console, transient=True, percent=True)
    bar.disable = not console.is_terminal
    task = bar.add_task("starting", total=remaining * severities * len(images))

    def progress(name: str, done: int, total: int) -> None:
        bar.update(task, description=name, completed=len(files) * total + done)
        if done == total:
            files.append(name)
            console.print(f"{name}.npy")

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    extra = {"seed": options.seed, "jobs": options.jobs or cores}
    with bar:
        made = corruptions.make(images, out, names, device=place, overlays=overlays, progress=progress, **extra)
    kept = len(names) - len(made)
    _say(f"{len(made)} made" + (f", {kept} were there" if kept else "") + f": {out}")
    if failure is not None:
        raise failure


def _say(text: str | Text) -> None:
    terminal().print(text, soft_wrap=True)


def _check_digits(name: str) -> None:
    if name == "digits":
        raise datasets.DataError("digits comes with scikit-learn; there is nothing to fetch or verify")
