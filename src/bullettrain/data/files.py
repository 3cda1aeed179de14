"""Readers of the user's own data: a folder of class folders with images, and .npz files with x and y."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bullettrain.data.base import DataError, ImageSet
from bullettrain.data.readers import Array, image_set
from bullettrain.extras import extra

_GREY = ("1", "L", "LA")
_DEEP = ("I", "F")  # and I;16 and its kin: more than a byte a pixel


def read_folder(
    path: Path, *, classes: tuple[str, ...] | None = None, image_size: tuple[int, int] | None = None
) -> ImageSet:
    """The images of a folder of class folders, as (n, C, H, W), classes and files in order of their names.

    The first image decides for grey or colour and, without image_size = (H, W), for the size of all.
    `classes` are those of the training folder, where `path` is its test folder.
    """
    found = class_names(path)
    if classes is None:
        if len(found) == 1:
            raise DataError(f"{path} has one class folder, {found[0]}: there have to be two classes to tell apart.")
        classes = found
    if unknown := sorted(set(found) - set(classes)):
        raise DataError(f"{path / unknown[0]} is a class that the training folder does not have: add it there.")
    entries = [(file, classes.index(name)) for name in found for file in _files(path / name)]
    with extra("a folder of images"):
        from PIL import Image
    first = _open(Image, entries[0][0])
    mode = "L" if first.mode in _GREY else "RGB"
    height, width = image_size or (first.height, first.width)
    images = np.empty((len(entries), height, width, len(mode)), np.uint8)
    for row, (file, _) in zip(images, entries, strict=True):
        image = _open(Image, file)
        if mode == "L" and image.mode not in _GREY:
            raise DataError(f"{file} is in colour but {entries[0][0]} is grey: make all images grey or all colour.")
        if image_size is None and (image.height, image.width) != (height, width):
            raise DataError(
                f"{file} is {image.height}x{image.width} but {entries[0][0]} is {height}x{width}:"
                " give an image size to resize them all, e.g. --set data.image_size=32 (evaluate: --image-size 32)."
            )
        image = image.convert(mode)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        row[:] = np.asarray(image).reshape(row.shape)
    return image_set(images.transpose(0, 3, 1, 2), np.array([label for _, label in entries]), classes)


def read_images(files: Sequence[Path], *, channels: int, image_size: int) -> Tensor:
    """Image files as uint8 (n, C, H, W), converted and resized as those of a folder are.

    Args:
        files: of any format that Pillow reads.
        channels: 1 for grey, 3 for colour.
        image_size: H = W.
    """
    with extra("an image"):
        from PIL import Image
    rows = []
    for file in files:
        if not file.is_file():
            what = "a folder" if file.is_dir() else "no regular file" if file.exists() else "missing"
            raise DataError(f"{file} is {what}: give image files.")
        image = _open(Image, file).convert("L" if channels == 1 else "RGB")
        if image.size != (image_size, image_size):
            image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
        rows.append(np.asarray(image).reshape(image_size, image_size, -1))
    return torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2).contiguous()


def class_names(path: Path) -> tuple[str, ...]:
    """The names of the class folders in `path`, sorted."""
    if not path.is_dir():
        raise DataError(f"{path} is not a folder: give one that holds a folder of images for each class.")
    names = tuple(sorted(f.name for f in path.iterdir() if f.is_dir() and not f.name.startswith(".")))
    if not names:
        raise DataError(f"{path} has no class folders: it is to hold a folder of images for each class.")
    return names


def _files(folder: Path) -> list[Path]:
    files = sorted(f for f in folder.iterdir() if not f.name.startswith("."))
    if not files:
        raise DataError(f"{folder} has no images: fill it or remove it.")
    return files


def _open(opener: Any, path: Path) -> Any:
    """The decoded image, or a DataError: Pillow meets damaged files with many kinds of exception."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for, for ever
        raise DataError(f"{path} is no regular file: replace it or remove it.")
    try:
        with opener.open(path) as image:
            image.load()
    except Exception as error:
        reason = "a folder inside a class folder" if path.is_dir() else "not an image that Pillow can read"
        if isinstance(error, OSError) and "truncated" in str(error):
            reason = "a truncated image"
        raise DataError(f"{path} is {reason}: replace it or remove it.") from error
    if image.mode.split(";")[0] in _DEEP:
        raise DataError(f"{path} has more than 8 bits a pixel (mode {image.mode}): convert it to 8 bits.")
    return image


def read_npz(path: Path) -> tuple[Array, Array]:
    """Images uint8 (n, C, H, W) and labels int64 (n,) of an .npz file with arrays x and y.

    x is (n, H, W), (n, H, W, C) or (n, C, H, W) with C = 1 or 3, uint8, or floating point in [0, 1].
    """
    if not path.is_file():
        raise DataError(f"{path} is missing: give an .npz file with arrays x and y.")
    try:
        with path.open("rb") as file, zipfile.ZipFile(file):
            pass  # np.load takes a file that is no zip for a pickle or an .npy
        with np.load(path, allow_pickle=False) as arrays:
            if absent := [key for key in ("x", "y") if key not in arrays]:
                there = ", ".join(arrays.files) or "nothing"
                raise DataError(f"{path} has no array '{absent[0]}' (it holds {there}): save it with x= and y=.")
            x, y = arrays["x"], arrays["y"]
    except DataError:
        raise
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, NotImplementedError, MemoryError) as error:
        if isinstance(error, ValueError) and "pickle" in str(error).lower():
            raise DataError(f"{path} holds Python objects: save x and y as arrays of numbers.") from error
        raise DataError(f"{path} is truncated or not an .npz file: save it again with numpy.savez.") from error
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise DataError(f"{path} has y of {y.dtype} and shape {y.shape}: give integers of shape (n,).")
    x = _as_bytes(path, _channels_first(path, x))
    if len(x) != len(y):
        raise DataError(f"{path} has {len(x)} images in x but {len(y)} labels in y: give one label an image.")
    if not len(y):
        raise DataError(f"{path} has no images: a dataset has at least one.")
    if int(y.min()) < 0:
        raise DataError(f"{path} has the label {int(y.min())}: number the classes from 0 on.")
    return x, y.astype(np.int64)


def _channels_first(path: Path, x: Array) -> Array:
    if x.ndim == 3:
        return x[:, None]
    first, last = (x.ndim == 4 and x.shape[axis] in (1, 3) for axis in (1, 3))
    if first == last:
        why = "could be channels first or last" if first else "has no axis of 1 or 3 channels"
        raise DataError(f"{path} has x of shape {x.shape}, which {why}: give (n, H, W) or (n, H, W, C).")
    return x if first else x.transpose(0, 3, 1, 2)


def _as_bytes(path: Path, x: Array) -> Array:
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind != "f":
        raise DataError(f"{path} has x of {x.dtype}: give uint8, or floating point in [0, 1].")
    if x.size and not (float(x.min()) >= 0 and float(x.max()) <= 1):  # also refuses NaN
        raise DataError(f"{path} has x outside [0, 1] (from {x.min():g} to {x.max():g}): scale it, or give uint8.")
    return np.round(x * np.float32(255)).astype(np.uint8)
