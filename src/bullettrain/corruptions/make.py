"""`make` the files of CIFAR-10-C or -100-C from a clean test set: in several processes, from where it broke off."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bullettrain.corruptions.files import LABELS, Array, image_file, open_images, read_labels, write_array
from bullettrain.corruptions.filters import SIDE
from bullettrain.corruptions.table import CORRUPTIONS, SEVERITIES, corrupt
from bullettrain.data.base import DataError, ImageSet, unwritable
from bullettrain.lock import alone, end_with_parent

Progress = Callable[[str, int, int], None]
"""Told a corruption's name, how many of its images are made, and of how many: of all, once its file is there."""

TASK = 500  # images that a process makes between two reports
BATCH = {"cpu": 100, "cuda": 2000}  # images at once: what a core's cache holds, what keeps a GPU busy
SEEDS = "seeds.json"  # which seed each random corruption was made with


def make(
    data: ImageSet,
    folder: Path,
    names: Sequence[str] = tuple(CORRUPTIONS),
    *,
    seed: int = 0,
    jobs: int = 1,
    device: torch.device | str = "cpu",
    overlays: Sequence[Tensor] = (),
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """Write ``name``.npy for each of ``names``, uint8 (5·n, 32, 32, 3), and labels.npy, uint8 (5·n,).

    Severities 1 to 5 come in turn, each with all n images of ``data`` in their order. Files that are there are
    kept; a new one is written beside and renamed. With ``jobs`` above 1 so many processes are started: on the CPU
    they make everything, beside a GPU what goes through a library an image at a time. (A script that asks for
    them has its own work under ``if __name__ == "__main__"``.) Returns the names that were made now.
    """
    if unknown := [name for name in names if name not in CORRUPTIONS]:
        raise ValueError(f"there is no corruption {unknown[0]!r}; there are {', '.join(CORRUPTIONS)}")
    place, data = torch.device(device), data.to("cpu")
    images = data.images.permute(0, 2, 3, 1).contiguous()
    if images.shape[1:] != (SIDE, SIDE, 3):
        raise DataError(f"images are {'×'.join(map(str, images.shape[1:]))}: corruptions are made of {SIDE}×{SIDE}×3.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            alone(folder, DataError(f"{folder} is in use: another process is making corruptions there.")),
            ExitStack() as stack,
        ):
            _put_labels(folder, data.labels.numpy())
            todo = _lacking(folder, names, seed, len(data))
            for name in todo:
                if CORRUPTIONS[name].serial:  # one image now: a package that is not installed is said at once
                    _made(images[:1], name, 1, 0, seed, overlays)
            pooled = [name for name in todo if jobs > 1 and (place.type == "cpu" or CORRUPTIONS[name].serial)]
            pending = stack.enter_context(_pool(jobs, images, pooled, seed, overlays))
            images, overlays = images.to(place), [overlay.to(place) for overlay in overlays]
            batch = BATCH.get(place.type, BATCH["cpu"])
            for name in sorted(todo, key=lambda name: name in pending):  # the device is not kept waiting
                pieces: Iterable[Array]
                if name in pending:
                    pieces = (future.result() for future in pending.pop(name))
                else:
                    pieces = (_made(*task, seed, overlays) for task in _tasks(images, name, batch))
                _write(folder, name, pieces, len(data), seed, progress)
    except OSError as error:
        raise unwritable(error, folder) from error
    except BrokenProcessPool as error:
        raise DataError("a process was killed, perhaps for want of memory: run it again with fewer --jobs.") from error
    return tuple(todo)


def _tasks(images: Tensor, name: str, size: int) -> Iterator[tuple[Tensor, str, int, int]]:
    """What `_made` takes for one corruption: severities in turn, and of each the images in pieces of ``size``."""
    for severity in range(1, SEVERITIES + 1):
        for first in range(0, len(images), size):
            yield images[first : first + size], name, severity, first


def _made(images: Tensor, name: str, severity: int, first: int, seed: int, overlays: Sequence[Tensor]) -> Array:
    """A piece of a corruption's file."""
    made: Array = corrupt(images, name, severity, seed=seed, first=first, overlays=overlays).cpu().numpy()
    return made


def _write(folder: Path, name: str, pieces: Iterable[Array], n: int, seed: int, progress: Progress | None) -> None:
    """One corruption's file, from its pieces in turn."""
    total = SEVERITIES * n

    def reported() -> Iterator[Array]:
        done = 0
        for piece in pieces:
            yield piece
            done += len(piece)
            if progress is not None and done < total:
                progress(name, done, total)

    if CORRUPTIONS[name].random:  # before the file: a kill in between leaves a seed without a file, and no harm
        _record_seed(folder, name, seed)
    write_array(image_file(folder, name), (total, SIDE, SIDE, 3), reported())
    if progress is not None:
        progress(name, total, total)


# ------------------------------------------------------------------------------------------------ the folder


def _put_labels(folder: Path, labels: Array) -> None:
    if (folder / LABELS).exists():
        if not np.array_equal(read_labels(folder), labels):
            raise DataError(f"{folder / LABELS} has the labels of other images: choose another folder.")
        return
    five = np.tile(labels.astype(np.uint8), SEVERITIES)
    write_array(folder / LABELS, five.shape, [five])


def _lacking(folder: Path, names: Sequence[str], seed: int, n: int) -> list[str]:
    """Those of ``names`` whose file is not there; one that is there has to be what would be made."""
    seeds = _seeds(folder)
    todo = []
    for name in dict.fromkeys(names):
        path = image_file(folder, name)
        if not path.exists():
            todo.append(name)
            continue
        open_images(path, SEVERITIES * n)
        if CORRUPTIONS[name].random and seeds.get(name, seed) != seed:
            raise DataError(
                f"{path} was made with seed {seeds[name]}, not {seed}: delete it, or choose another folder."
            )
    return todo


def _seeds(folder: Path) -> dict[str, int]:
    try:
        seeds = json.loads((folder / SEEDS).read_text(encoding="utf-8"))
        return {str(name): int(seed) for name, seed in seeds.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError):
        raise DataError(f"{folder / SEEDS} is damaged: delete it.") from None


def _record_seed(folder: Path, name: str, seed: int) -> None:
    beside = folder / f".{SEEDS}.new"
    beside.write_text(json.dumps({**_seeds(folder), name: seed}, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, folder / SEEDS)


# ----------------------------------------------------------------------------------------------- the processes


@contextmanager
def _pool(
    jobs: int, images: Tensor, names: Sequence[str], seed: int, overlays: Sequence[Tensor]
) -> Iterator[dict[str, list[Future[Array]]]]:
    """``jobs`` processes at work on ``names``: the pieces of each, as they will come; none are started for nothing."""
    if not names:
        yield {}
        return
    # Spawned, since a fork would copy CUDA and threads; arrays, since torch sends its tensors through shared files.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin)
    try:
        with _no_interrupts():
            arrays = [overlay.numpy() for overlay in overlays]
            pending = {
                name: [
                    pool.submit(_piece, piece.numpy(), name, severity, first, seed, arrays if name == "frost" else [])
                    for piece, _, severity, first in _tasks(images, name, TASK)
                ]
                for name in names
            }
        yield pending
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ctrl-C reaches all processes; those that are started in here never hear it, and the first ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin() -> None:
    torch.set_num_threads(1)
    end_with_parent()


def _piece(images: Array, name: str, severity: int, first: int, seed: int, overlays: Sequence[Array]) -> Array:
    """`_made` in another process: of arrays, and in batches that a core's cache holds."""
    x, size = torch.from_numpy(images), BATCH["cpu"]
    photographs = [torch.from_numpy(overlay) for overlay in overlays]
    return np.concatenate(
        [_made(x[at : at + size], name, severity, first + at, seed, photographs) for at in range(0, len(x), size)]
    )
