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
from bullettrain.data.base import DataError, ImageSet

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
    place = torch.device(device)
    images = data.images.permute(0, 2, 3, 1).contiguous()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder), ExitStack() as stack:
            _put_labels(folder, data.labels.numpy())
            todo = _lacking(folder, names, seed, len(data))
            for name in todo:
                if CORRUPTIONS[name].serial:  # one image now: a package that is not installed is said at once
                    _made(images, name, 1, slice(0, 1), seed, overlays)
            pooled = [name for name in todo if jobs > 1 and (place.type == "cpu" or CORRUPTIONS[name].serial)]
            pending: dict[str, list[Future[Array]]] = {}
            if pooled:
                pool = stack.enter_context(_pool(jobs, images, seed, overlays))
                for name in pooled:
                    pending[name] = [pool.submit(_piece, name, *task) for task in _tasks(len(data), TASK)]
            images, overlays = images.to(place), [overlay.to(place) for overlay in overlays]
            batch = BATCH.get(place.type, BATCH["cpu"])
            for name in sorted(todo, key=lambda name: name in pending):  # the device is not kept waiting
                pieces: Iterable[Array]
                if name in pending:
                    pieces = (future.result() for future in pending.pop(name))
                else:
                    pieces = (_made(images, name, *task, seed, overlays) for task in _tasks(len(data), batch))
                _write(folder, name, pieces, len(data), seed, progress)
    except OSError as error:
        raise DataError(
            f"{error.filename or folder} cannot be written ({error.strerror}):"
            " free some room, or choose another folder."
        ) from error
    except BrokenProcessPool as error:
        raise DataError("a process was killed, perhaps for want of memory: run it again with fewer --jobs.") from error
    return tuple(todo)


def _tasks(n: int, size: int) -> Iterator[tuple[int, slice]]:
    """Severities in turn, and of each the images in pieces of ``size``."""
    for severity in range(1, SEVERITIES + 1):
        for first in range(0, n, size):
            yield severity, slice(first, min(first + size, n))


def _made(images: Tensor, name: str, severity: int, rows: slice, seed: int, overlays: Sequence[Tensor]) -> Array:
    """A piece of a corruption's file."""
    made = corrupt(images[rows], name, severity, seed=seed, first=rows.start, overlays=overlays)
    piece: Array = made.cpu().numpy()
    return piece


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


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder: a second process that makes files in it is refused."""
    try:
        import fcntl
    except ImportError:  # Windows: no such lock
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder} is in use: another process is making corruptions there.") from None
        yield
    finally:
        os.close(handle)


# ----------------------------------------------------------------------------------------------- the processes

_source: tuple[Tensor, int, Sequence[Tensor]]
"""In a process of the pool: the clean images, the seed, the overlays."""


@contextmanager
def _pool(jobs: int, images: Tensor, seed: int, overlays: Sequence[Tensor]) -> Iterator[ProcessPoolExecutor]:
    # Arrays, since torch would share its tensors through files; spawned, since a fork copies CUDA and threads.
    arrays = (images.numpy(), seed, [overlay.numpy() for overlay in overlays])
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, arrays)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(images: Array, seed: int, overlays: Sequence[Array]) -> None:
    global _source
    _source = torch.from_numpy(images), seed, [torch.from_numpy(overlay) for overlay in overlays]
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process whose parent was killed would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _piece(name: str, severity: int, rows: slice) -> Array:
    images, seed, overlays = _source
    size = BATCH["cpu"]
    batches = (slice(at, min(at + size, rows.stop)) for at in range(rows.start, rows.stop, size))
    return np.concatenate([_made(images, name, severity, batch, seed, overlays) for batch in batches])
