"""Make the files of CIFAR-10-C or CIFAR-100-C from a clean test set, in several processes. Existing files are kept."""

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

from bullettrain.corruptions.files import LABELS, image_file, open_images, read_labels, write_array
from bullettrain.corruptions.filters import SIDE
from bullettrain.corruptions.table import CORRUPTIONS, SEVERITIES, corrupt
from bullettrain.data.base import DataError, ImageSet, writing
from bullettrain.data.readers import Array
from bullettrain.errors import raised_as
from bullettrain.lock import end_with_parent, locked
from bullettrain.validation import check_known

Progress = Callable[[str, int, int], None]
"""Called with the name of a corruption, its images made so far, and its images in all, at the end for all of them."""

IMAGES_PER_TASK = 500  # images per task of a process
BATCH_SIZE = {"cpu": 100, "cuda": 2000}  # images at a time: fits into the cache of a core, keeps a GPU busy
SEEDS = "seeds.json"  # the seed of each random corruption


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

    A file has severities 1 to 5 in turn, each with all n images of ``data`` in order. Existing files are kept.

    Args:
        data: the clean images.
        folder: folder of the files; created if necessary.
        names: corruptions to make.
        seed: of the random numbers.
        jobs: number of processes. If there are several, they make all corruptions on the CPU, or with a GPU those that
            use a CPU library. A script that sets this needs ``if __name__ == "__main__"``.
        device: device of the computation.
        overlays: the images for frost, from `read_overlays`.
        progress: called as images are made.

    Returns:
        The names of the files that were written.

    Raises:
        DataError: the images are not 32×32×3, or the folder cannot be written or has other files.
    """
    for name in names:
        check_known(name, CORRUPTIONS, "there is no corruption")
    place, data = torch.device(device), data.to("cpu")
    images = data.images.permute(0, 2, 3, 1).contiguous()
    if images.shape[1:] != (SIDE, SIDE, 3):
        raise DataError(f"images are {'×'.join(map(str, images.shape[1:]))}: corruptions need {SIDE}×{SIDE}×3.")
    killed = "a process was killed, perhaps for lack of memory: run it again with fewer --jobs."
    with writing(folder), raised_as(DataError, killed, BrokenProcessPool):
        folder.mkdir(parents=True, exist_ok=True)
        with (
            locked(folder, DataError(f"{folder} is in use: another process is making corruptions there.")),
            ExitStack() as stack,
        ):
            _put_labels(folder, data.labels.numpy())
            todo = _missing(folder, names, seed, len(data))
            for name in todo:
                if CORRUPTIONS[name].serial:  # try one image, to report a missing package early
                    _made(images[:1], name, 1, 0, seed, overlays)
            pooled = [name for name in todo if jobs > 1 and (place.type == "cpu" or CORRUPTIONS[name].serial)]
            pending = stack.enter_context(_pool(jobs, images, pooled, seed, overlays))
            images, overlays = images.to(place), [overlay.to(place) for overlay in overlays]
            batch = BATCH_SIZE.get(place.type, BATCH_SIZE["cpu"])
            for name in sorted(todo, key=lambda name: name in pending):  # start with what the device makes
                pieces: Iterable[Array]
                if name in pending:
                    pieces = (future.result() for future in pending.pop(name))
                else:
                    pieces = (_made(*task, seed, overlays) for task in _tasks(images, name, batch))
                _write(folder, name, pieces, len(data), seed, progress)
    return tuple(todo)


def _tasks(images: Tensor, name: str, size: int) -> Iterator[tuple[Tensor, str, int, int]]:
    """Yield the first arguments of `_made` for one corruption: by severity, in pieces of ``size`` images."""
    for severity in range(1, SEVERITIES + 1):
        for first in range(0, len(images), size):
            yield images[first : first + size], name, severity, first


def _made(images: Tensor, name: str, severity: int, first: int, seed: int, overlays: Sequence[Tensor]) -> Array:
    """Make a piece of the file of a corruption."""
    made: Array = corrupt(images, name, severity, seed=seed, first=first, overlays=overlays).cpu().numpy()
    return made


def _write(folder: Path, name: str, pieces: Iterable[Array], n: int, seed: int, progress: Progress | None) -> None:
    """Write the file of one corruption, and report progress."""
    total = SEVERITIES * n

    def reported() -> Iterator[Array]:
        done = 0
        for piece in pieces:
            yield piece
            done += len(piece)
            if progress is not None and done < total:
                progress(name, done, total)

    if CORRUPTIONS[name].random:  # before the file: a seed without a file does no harm
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
    repeated = np.tile(labels.astype(np.uint8), SEVERITIES)
    write_array(folder / LABELS, repeated.shape, [repeated])


def _missing(folder: Path, names: Sequence[str], seed: int, n: int) -> list[str]:
    """Return the names whose file is missing. Raises DataError if an existing file has another size or seed."""
    seeds = _seeds(folder)
    todo = []
    for name in dict.fromkeys(names):
        path = image_file(folder, name)
        if not path.exists():
            todo.append(name)
            continue
        open_images(path, SEVERITIES * n)
        if CORRUPTIONS[name].random and seeds.get(name, seed) != seed:
            raise DataError(f"{path} has seed {seeds[name]}, not {seed}: delete it, or choose another folder.")
    return todo


def _seeds(folder: Path) -> dict[str, int]:
    file = folder / SEEDS
    if not file.exists():
        return {}
    with raised_as(DataError, f"{file} is damaged: delete it.", ValueError, AttributeError, TypeError):
        return {str(name): int(seed) for name, seed in json.loads(file.read_text(encoding="utf-8")).items()}


def _record_seed(folder: Path, name: str, seed: int) -> None:
    temporary = folder / f".{SEEDS}.new"
    temporary.write_text(json.dumps({**_seeds(folder), name: seed}, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / SEEDS)


# ----------------------------------------------------------------------------------------------- the processes


@contextmanager
def _pool(
    jobs: int, images: Tensor, names: Sequence[str], seed: int, overlays: Sequence[Tensor]
) -> Iterator[dict[str, list[Future[Array]]]]:
    """Start ``jobs`` processes, and yield the futures of the pieces of each name. Without names, start none."""
    if not names:
        yield {}
        return
    # Spawned, because a fork copies CUDA and threads; arrays, because torch sends tensors through shared files.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin)
    try:
        with _no_interrupts():
            arrays = [overlay.numpy() for overlay in overlays]
            pending = {
                name: [
                    pool.submit(_piece, piece.numpy(), name, severity, first, seed, arrays if name == "frost" else [])
                    for piece, _, severity, first in _tasks(images, name, IMAGES_PER_TASK)
                ]
                for name in names
            }
        yield pending
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Make processes started inside ignore Ctrl-C, which reaches all of them; the main process ends them."""
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
    """Call `_made` in another process, with arrays and in batches for the CPU."""
    x, size = torch.from_numpy(images), BATCH_SIZE["cpu"]
    photographs = [torch.from_numpy(overlay) for overlay in overlays]
    return np.concatenate(
        [_made(x[at : at + size], name, severity, first + at, seed, photographs) for at in range(0, len(x), size)]
    )
