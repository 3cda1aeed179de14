"""The files of CIFAR-10-C and CIFAR-100-C: one .npy file per corruption, memory-mapped, and labels.npy."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from bullettrain.corruptions.filters import SIDE
from bullettrain.corruptions.table import SEVERITIES
from bullettrain.data.base import DataError, reading
from bullettrain.data.readers import Array, check_labels

LABELS = "labels.npy"


def image_file(folder: Path, name: str) -> Path:
    """Return the path of the images of corruption ``name``."""
    return folder / f"{name}.npy"


def open_images(path: Path, count: int) -> Array:
    """Open the ``count`` images of a corruption, uint8 (count, 32, 32, 3), as a memory map."""
    array = _open(path)
    if array.dtype != np.uint8 or array.shape[1:] != (SIDE, SIDE, 3):
        raise DataError(f"{path} holds {array.dtype} of shape {array.shape}: expected uint8 (n, {SIDE}, {SIDE}, 3).")
    if len(array) != count:
        raise DataError(f"{path} has {len(array)} images, but there are {count} labels: they are not of one set.")
    return array


def read_labels(folder: Path, classes: int | None = None) -> Array:
    """Read the labels of one severity, int64 (n,), the same for all five; they have to be below ``classes``."""
    path = folder / LABELS
    array = _open(path)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(f"{path} holds {array.dtype} of shape {array.shape}: labels are integers, one for each image.")
    labels = np.asarray(array)
    check_labels(path, labels, classes)
    if len(labels) % SEVERITIES or (labels.reshape(SEVERITIES, -1) != labels[: len(labels) // SEVERITIES]).any():
        raise DataError(f"{path} does not hold the same labels {SEVERITIES} times over, once for each severity.")
    return labels[: len(labels) // SEVERITIES].astype(np.int64)


def write_array(path: Path, shape: tuple[int, ...], pieces: Iterable[Array]) -> None:
    """Write ``pieces`` of uint8, one after the other, to an .npy file, which is replaced at the end."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for piece in pieces:
                file.write(np.ascontiguousarray(piece, np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _open(path: Path) -> Array:
    missing = "put the released file there, or run `bullettrain data corrupt`"
    with reading(path, "an .npy file", "delete it, and download or make it again", missing=missing):
        with path.open("rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):  # in other versions a header of 4 GiB would be read
                raise ValueError("its format is not 1.0")
        array: Array = np.lib.format.open_memmap(path, mode="r")  # np.load would also open pickles and zip files
    return array
