"""The files of CIFAR-10-C and -100-C: one .npy a corruption, memory-mapped, and labels.npy."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bullettrain.corruptions.filters import SIDE
from bullettrain.corruptions.table import SEVERITIES
from bullettrain.data.base import DataError, reading
from bullettrain.data.readers import check_labels

Array = np.ndarray[Any, np.dtype[Any]]
LABELS = "labels.npy"


def image_file(folder: Path, name: str) -> Path:
    """Where the images of corruption ``name`` lie."""
    return folder / f"{name}.npy"


def open_images(path: Path, count: int) -> Array:
    """The ``count`` images of a corruption's file, uint8 (count, 32, 32, 3), read from the disk as they are used."""
    array = _open(path)
    if array.dtype != np.uint8 or array.shape[1:] != (SIDE, SIDE, 3):
        raise DataError(
            f"{path} holds {array.dtype} of shape {array.shape}: a corruption's file has uint8 (n, {SIDE}, {SIDE}, 3)."
        )
    if len(array) != count:
        raise DataError(f"{path} has {len(array)} images, but there are {count} labels: they are not of one set.")
    return array


def read_labels(folder: Path, classes: int | None = None) -> Array:
    """The labels of one severity, int64 (n,); all five have the same. ``classes``: none may be as high."""
    path = folder / LABELS
    array = _open(path)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(f"{path} holds {array.dtype} of shape {array.shape}: labels are integers, one for each image.")
    labels = np.asarray(array)
    check_labels(path, labels, int(labels.max(initial=0)) + 1 if classes is None else classes)
    if len(labels) % SEVERITIES or (labels.reshape(SEVERITIES, -1) != labels[: len(labels) // SEVERITIES]).any():
        raise DataError(f"{path} does not hold the same labels {SEVERITIES} times over, once for each severity.")
    return labels[: len(labels) // SEVERITIES].astype(np.int64)


def write_array(path: Path, shape: tuple[int, ...], pieces: Iterable[Array]) -> None:
    """Write ``pieces`` of uint8, one after the other, as the .npy file that numpy.save would; whole or not at all."""
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("wb") as file:
            header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.uint8)), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for piece in pieces:
                file.write(np.ascontiguousarray(piece, np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _open(path: Path) -> Array:
    missing = "put the released file there, or run `bullettrain data corrupt`"
    with reading(path, "an .npy file", "delete it, and fetch or make it again", missing=missing):
        with path.open("rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):  # the header of others may have 4 GiB, and is read whole
                raise ValueError("its format is not 1.0")
        array: Array = np.lib.format.open_memmap(path, mode="r")  # np.load would take other files for a pickle or a zip
    return array
