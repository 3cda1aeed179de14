"""Readers of the user's data: folders with one folder of images per class, and .npz files with x and y."""

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
from bullettrain.data.readers import Array, check_labels, image_set
from bullettrain.extras import extra

MAX_PIXELS = 1 << 26
"""Maximum size of an image: 8192×8192."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA", "ICO")
"""Image formats that are read, by Pillow's names. For others, such as EPS, Pillow starts external programs."""
_GREY = ("1", "L", "LA")
_DEEP = ("I", "F")  # and I;16 and its variants: more than 8 bits per pixel


def read_folder(path: Path, *, like: Path | None = None, image_size: tuple[int, int] | None = None) -> ImageSet:
    """Read a folder with one folder of images per class; classes and files are sorted by name.

    The first image determines whether all are read as grey or colour images and, without ``image_size``, their size.

    Args:
        path: the folder.
        like: the training folder, if ``path`` is a test folder. Its classes and its first image are used.
        image_size: (H, W) to resize all images to.

    Raises:
        DataError: the folder or an image cannot be used.
    """
    like = like or path
    classes, names = class_names(like), class_names(path)
    if len(classes) == 1:
        raise DataError(f"{like} has one class folder, {classes[0]}: at least two are needed.")
    if unknown := sorted(set(names) - set(classes)):
        raise DataError(f"{path / unknown[0]} is a class that the training folder does not have: add it there.")
    entries = [(file, classes.index(name)) for name in names for file in files_in(path / name)]
    example = files_in(like / classes[0])[0]
    first = read_image(example)
    mode = "L" if first.mode in _GREY else "RGB"
    height, width = image_size or (first.height, first.width)
    images = _allocate(path, len(entries), height, width, len(mode))
    for row, (file, _) in zip(images, entries, strict=True):
        image = read_image(file)
        if mode == "L" and image.mode not in _GREY:
            raise DataError(f"{file} is in colour but {example} is grey: make all images grey or all colour.")
        if image_size is None and (image.height, image.width) != (height, width):
            give = "give an image size to resize all, e.g. --set data.image_size=32 (evaluate: --image-size 32)"
            raise DataError(f"{file} is {image.height}x{image.width} but {example} is {height}x{width}: {give}.")
        row[:] = _pixels(image, mode, height, width)
    return image_set(images.transpose(0, 3, 1, 2), np.array([label for _, label in entries]), classes)


def read_images(files: Sequence[Path], *, channels: int, image_size: int) -> Tensor:
    """Read image files as uint8 (n, C, H, W), converted and resized like those of a folder.

    Args:
        files: images in any of FORMATS.
        channels: 1 for grey, 3 for colour.
        image_size: H = W.
    """
    mode = "L" if channels == 1 else "RGB"
    images = _allocate(files[0], len(files), image_size, image_size, len(mode))
    for row, file in zip(images, files, strict=True):
        row[:] = _pixels(read_image(file), mode, image_size, image_size)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def class_names(path: Path) -> tuple[str, ...]:
    """Return the sorted names of the class folders in ``path``."""
    if not path.is_dir():
        raise DataError(f"{path} is not a folder: give a folder with one folder of images per class.")
    names = tuple(sorted(f.name for f in path.iterdir() if f.is_dir() and not f.name.startswith(".")))
    if not names:
        raise DataError(f"{path} has no class folders: it needs one folder of images per class.")
    return names


def read_image(path: Path) -> Any:
    """Read and decode an image with Pillow."""
    with extra("an image"):
        from PIL import Image, UnidentifiedImageError
    with reading(path, "an image that Pillow can read", "replace it, or move it elsewhere", missing="give image files"):
        if path.is_dir():
            raise DataError(f"{path} is a folder, not an image: give image files.")
        Image.init()
        content = io.BytesIO(path.read_bytes())  # a wrong length in a damaged file cannot allocate more than the file
        try:
            image = Image.open(content, formats=[name for name in FORMATS if name in Image.OPEN])
        except UnidentifiedImageError:  # its message names the buffer
            raise ValueError("unknown format") from None
        with image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"{path} has {image.height}x{image.width} pixels, over {MAX_PIXELS}: make it smaller.")
            image.load()
    if image.mode.split(";")[0] in _DEEP:
        raise DataError(f"{path} has more than 8 bits per pixel (mode {image.mode}): convert it to 8 bits.")
    return image


def files_in(folder: Path, *, nested: bool = False) -> list[Path]:
    """Return the sorted files in a folder of images, without hidden ones.

    Args:
        folder: of images.
        nested: also return the files of the folders in it, except those that are symbolic links, which may be loops.
    """
    inside = (f for f in folder.rglob("*") if f.is_symlink() or not f.is_dir()) if nested else folder.iterdir()
    files = sorted(f for f in inside if not any(part.startswith(".") for part in f.relative_to(folder).parts))
    if not files:
        raise DataError(f"{folder} has no images: add some, or move it elsewhere.")
    return files


def _allocate(path: Path, *shape: int) -> Array:
    """Allocate images (n, H, W, C). Raises DataError if the machine has too little memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf
    if math.prod(shape) > memory:
        size = f"{shape[0]} images of {shape[1]}x{shape[2]} take {math.prod(shape) >> 30} GiB of memory"
        raise DataError(f"{path}: {size}, more than this machine has: choose a smaller image size.")
    return np.empty(shape, np.uint8)


def _pixels(image: Any, mode: str, height: int, width: int) -> Array:
    """Convert and resize an image, and return its pixels (H, W, C)."""
    from PIL import Image

    image = image.convert(mode)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(height, width, len(mode))


def read_npz(path: Path) -> tuple[Array, Array]:
    """Read images uint8 (n, C, H, W) and labels int64 (n,) from an .npz file with arrays x and y.

    x is (n, H, W), (n, H, W, C) or (n, C, H, W) with C = 1 or 3, uint8, or floating point in [0, 1].
    """
    fix = "save arrays of numbers, x and y, with numpy.savez"
    with reading(path, "an .npz file", fix, missing="give an .npz file with arrays x and y"):
        with zipfile.ZipFile(path) as archive:
            if absent := [key for key in ("x", "y") if f"{key}.npy" not in archive.namelist()]:
                content = ", ".join(name.removesuffix(".npy") for name in archive.namelist()) or "nothing"
                raise DataError(f"{path} has no array '{absent[0]}' (it holds {content:.200}): save it with x= and y=.")
            x, y = (_read_member(path, archive, f"{key}.npy") for key in ("x", "y"))
        if y.dtype.kind not in "iu" or y.ndim != 1:
            raise DataError(f"{path} has y of {y.dtype} and shape {y.shape}: give integers of shape (n,).")
        x = _as_bytes(path, _channels_first(path, x))
    check_labels(path, y, images=len(x))
    return x, y.astype(np.int64)


def _read_member(path: Path, archive: zipfile.ZipFile, name: str) -> Array:
    """Read an array of an .npz file, after checking that its header agrees with its size."""
    member = archive.getinfo(name)
    check_unpacked(path, member.file_size)
    with archive.open(member) as file:
        read = np.lib.format.read_array_header_1_0
        if np.lib.format.read_magic(file) > (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > member.file_size:
        raise ValueError(f"an array of shape {shape} does not fit its {member.file_size} bytes")
    with archive.open(member) as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _channels_first(path: Path, x: Array) -> Array:
    if 0 in x.shape[1:]:
        raise DataError(f"{path} has x of shape {x.shape}, images without pixels: give (n, H, W) or (n, H, W, C).")
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
