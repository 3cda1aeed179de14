"""Readers of the user's own data: a folder of class folders with images, and .npz files with x and y."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bullettrain.data.base import DataError, ImageSet, check_unpacked, reading
from bullettrain.data.readers import Array, image_set
from bullettrain.extras import extra

MAX_PIXELS = 1 << 26
"""Of one image: 8192×8192."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA", "ICO")
"""Pillow's names of the image formats that are read; for others, such as EPS, it starts programs."""
_GREY = ("1", "L", "LA")
_DEEP = ("I", "F")  # and I;16 and its kin: more than a byte a pixel


def read_folder(path: Path, *, like: Path | None = None, image_size: tuple[int, int] | None = None) -> ImageSet:
    """The images of a folder of class folders, as (n, C, H, W), classes and files in order of their names.

    The first image decides for grey or colour and, without image_size, for the size of all.

    Args:
        path: the folder.
        like: the training folder, where `path` is its test folder: its classes and its first image decide.
        image_size: (H, W) to resize all images to.
    """
    like = like or path
    classes, found = class_names(like), class_names(path)
    if len(classes) == 1:
        raise DataError(f"{like} has one class folder, {classes[0]}: there have to be two classes to tell apart.")
    if unknown := sorted(set(found) - set(classes)):
        raise DataError(f"{path / unknown[0]} is a class that the training folder does not have: add it there.")
    entries = [(file, classes.index(name)) for name in found for file in _files(path / name)]
    example = _files(like / classes[0])[0]
    first = read_image(example)
    mode = "L" if first.mode in _GREY else "RGB"
    height, width = image_size or (first.height, first.width)
    images = _room(path, len(entries), height, width, len(mode))
    for row, (file, _) in zip(images, entries, strict=True):
        image = read_image(file)
        if mode == "L" and image.mode not in _GREY:
            raise DataError(f"{file} is in colour but {example} is grey: make all images grey or all colour.")
        if image_size is None and (image.height, image.width) != (height, width):
            raise DataError(
                f"{file} is {image.height}x{image.width} but {example} is {height}x{width}:"
                " give an image size to resize them all, e.g. --set data.image_size=32 (evaluate: --image-size 32)."
            )
        row[:] = _pixels(image, mode, height, width)
    return image_set(images.transpose(0, 3, 1, 2), np.array([label for _, label in entries]), classes)


def read_images(files: Sequence[Path], *, channels: int, image_size: int) -> Tensor:
    """Image files as uint8 (n, C, H, W), converted and resized as those of a folder are.

    Args:
        files: of any of FORMATS.
        channels: 1 for grey, 3 for colour.
        image_size: H = W.
    """
    mode = "L" if channels == 1 else "RGB"
    images = _room(files[0], len(files), image_size, image_size, len(mode))
    for row, file in zip(images, files, strict=True):
        row[:] = _pixels(read_image(file), mode, image_size, image_size)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def class_names(path: Path) -> tuple[str, ...]:
    """The names of the class folders in `path`, sorted."""
    if not path.is_dir():
        raise DataError(f"{path} is not a folder: give one that holds a folder of images for each class.")
    names = tuple(sorted(f.name for f in path.iterdir() if f.is_dir() and not f.name.startswith(".")))
    if not names:
        raise DataError(f"{path} has no class folders: it is to hold a folder of images for each class.")
    return names


def read_image(path: Path) -> Any:
    """A decoded image of Pillow's."""
    with extra("an image"):
        from PIL import Image
    with reading(path, "an image that Pillow can read", "replace it or remove it", missing="give image files"):
        if path.is_dir():
            raise DataError(f"{path} is a folder where an image belongs: give image files, or take it out.")
        Image.init()
        content = io.BytesIO(path.read_bytes())  # from which a length in a damaged file reads no more than there is
        with Image.open(content, formats=[name for name in FORMATS if name in Image.OPEN]) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"{path} has {image.height}x{image.width} pixels, over {MAX_PIXELS}: make it smaller.")
            image.load()
    if image.mode.split(";")[0] in _DEEP:
        raise DataError(f"{path} has more than 8 bits a pixel (mode {image.mode}): convert it to 8 bits.")
    return image


def _files(folder: Path) -> list[Path]:
    files = sorted(f for f in folder.iterdir() if not f.name.startswith("."))
    if not files:
        raise DataError(f"{folder} has no images: fill it or remove it.")
    return files


def _room(path: Path, *shape: int) -> Array:
    """Memory for the images (n, H, W, C) of ``path``, where the machine has it."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf
    if math.prod(shape) > there:
        size = f"{shape[0]} images of {shape[1]}x{shape[2]} take {math.prod(shape) >> 30} GiB of memory"
        raise DataError(f"{path}: {size}, more than there is: choose a smaller image size.")
    return np.empty(shape, np.uint8)


def _pixels(image: Any, mode: str, height: int, width: int) -> Array:
    """(H, W, C) of an image, converted and resized."""
    from PIL import Image

    image = image.convert(mode)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(height, width, len(mode))


def read_npz(path: Path) -> tuple[Array, Array]:
    """Images uint8 (n, C, H, W) and labels int64 (n,) of an .npz file with arrays x and y.

    x is (n, H, W), (n, H, W, C) or (n, C, H, W) with C = 1 or 3, uint8, or floating point in [0, 1].
    """
    mend = "save arrays of numbers, x and y, with numpy.savez"
    with reading(path, "an .npz file", mend, missing="give an .npz file with arrays x and y"):
        with zipfile.ZipFile(path) as archive:
            if absent := [key for key in ("x", "y") if f"{key}.npy" not in archive.namelist()]:
                there = ", ".join(name.removesuffix(".npy") for name in archive.namelist()) or "nothing"
                raise DataError(f"{path} has no array '{absent[0]}' (it holds {there:.200}): save it with x= and y=.")
            x, y = (_read_member(path, archive, f"{key}.npy") for key in ("x", "y"))
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


def _read_member(path: Path, archive: zipfile.ZipFile, name: str) -> Array:
    """An array of an .npz file, whose header promises no more than there is."""
    packed = archive.getinfo(name)
    check_unpacked(path, packed.file_size)
    with archive.open(packed) as file:
        read = np.lib.format.read_array_header_1_0
        if np.lib.format.read_magic(file) > (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > packed.file_size:
        raise ValueError(f"an array of shape {shape} does not fit its {packed.file_size} bytes")
    with archive.open(packed) as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return array


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
