"""Readers of MNIST, CIFAR-10, CIFAR-100 (in the folders of torchvision) and scikit-learn's digits."""

from __future__ import annotations

import gzip
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bullettrain.data.base import (
    FOLDERS,
    DataError,
    ImageSet,
    check_unpacked,
    reading_original,
    renewed_by,
    unpacked_limit,
)
from bullettrain.data.pickles import read_pickle, text
from bullettrain.extras import extra

Array = np.ndarray[Any, np.dtype[Any]]

MNIST_PREFIX = {"train": "train", "test": "t10k"}
CIFAR10_FILES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}

_IDX_KINDS = {0x0801: "labels", 0x0803: "images"}


def read_mnist(root: Path, split: str) -> ImageSet:
    """Read MNIST, images (n, 1, 28, 28), from root/MNIST/raw; files may be plain or .gz."""
    folder = root / FOLDERS["mnist"]
    images_path = idx_path(folder / f"{MNIST_PREFIX[split]}-images-idx3-ubyte")
    labels_path = idx_path(folder / f"{MNIST_PREFIX[split]}-labels-idx1-ubyte")
    images, labels = read_idx(images_path, "images"), read_idx(labels_path, "labels")
    check_labels(labels_path, labels, 10, len(images))
    return image_set(images[:, None], labels, tuple("0123456789"))


def idx_path(path: Path) -> Path:
    """Return ``path``, or ``path``.gz if only that exists."""
    packed = path.with_name(path.name + ".gz")
    return packed if os.path.exists(packed) and not os.path.exists(path) else path


def idx_bytes(path: Path) -> bytes:
    """Return the content of an idx file, uncompressed if it is a .gz file."""
    with reading_original(path, "mnist", "a gzip file" if path.suffix == ".gz" else "an idx file"):
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            data = file.read(unpacked_limit(path) + 1)
    check_unpacked(path, len(data))
    return data


def read_idx(path: Path, kind: str) -> Array:
    """Read the uint8 array of an idx file: (n, H, W) if ``kind`` is "images", (n,) if it is "labels"."""
    data = idx_bytes(path)
    actual = _IDX_KINDS.get(int.from_bytes(data[:4], "big"))
    start = 8 if kind == "labels" else 16
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4))
    size = start + math.prod(shape)
    if actual is None:
        begins = data[:4].hex(" ") or "nothing"
        raise _damaged(path, "mnist", f"is not an MNIST idx file (it begins with {begins})")
    if actual != kind:
        raise _damaged(path, "mnist", f"holds {actual} where {kind} were expected, as if it were renamed")
    if len(data) != size:
        wrong = "is truncated" if len(data) < size else "is too long"
        raise _damaged(path, "mnist", f"{wrong}, {len(data)} bytes of {size}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_cifar10(root: Path, split: str) -> ImageSet:
    """Read CIFAR-10, images (n, 3, 32, 32), from root/cifar-10-batches-py."""
    folder = root / FOLDERS["cifar10"]
    classes = read_names(folder / "batches.meta", "label_names", 10, "cifar10")
    batches = [read_batch(folder / name, "labels", 10, "cifar10") for name in CIFAR10_FILES[split]]
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return image_set(images, labels, classes)


def read_cifar100(root: Path, split: str) -> ImageSet:
    """Read CIFAR-100 with its 100 fine classes, images (n, 3, 32, 32), from root/cifar-100-python."""
    folder = root / FOLDERS["cifar100"]
    classes = read_names(folder / "meta", "fine_label_names", 100, "cifar100")
    images, labels = read_batch(folder / split, "fine_labels", 100, "cifar100")
    return image_set(images, labels, classes)


def read_batch(path: Path, key: str, classes: int, name: str) -> tuple[Array, Array]:
    """Read one CIFAR batch: images uint8 (n, 3, 32, 32), and labels int64 (n,) from the entry ``key``."""
    content = read_pickle(path, name)
    if "data" not in content or key not in content:
        keys = ", ".join(sorted(content)) or "nothing"
        raise DataError(f"{path} is no {name} batch: it holds {keys:.200}, and 'data' and '{key}' were expected.")
    images, labels = content["data"], content[key]
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (3072,):
        what = f"{images.dtype} data of shape {images.shape}" if isinstance(images, np.ndarray) else "no array of data"
        raise _damaged(path, name, f"holds {what} where {name} has uint8 (n, 3072)")
    if isinstance(labels, list) and all(type(label) is int for label in labels):
        labels = np.array(labels)  # has dtype object if a label has more than 64 bits
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DataError(f"{path} holds '{key}' that are no list of integers: it is no {name} batch.")
    check_labels(path, labels, classes, len(images))
    return np.asarray(images).reshape(-1, 3, 32, 32), labels.astype(np.int64)


def read_names(path: Path, key: str, count: int, name: str) -> tuple[str, ...]:
    """Read the class names from the entry ``key`` of CIFAR's meta file."""
    names = read_pickle(path, name).get(key)
    if not isinstance(names, list) or len(names) != count or not all(isinstance(n, str | bytes) for n in names):
        raise _damaged(path, name, f"does not hold the {count} '{key}' of {name}")
    return tuple(map(text, names))


def _damaged(path: Path, name: str, what: str) -> DataError:
    """Return the error for a file of dataset ``name`` that has to be downloaded again."""
    return DataError(f"{path} {what}: delete it and run `{renewed_by(path, name)}`.")


def read_digits() -> ImageSet:
    """Read scikit-learn's handwritten digits, images (1797, 1, 8, 8), with values 0..16 scaled to 0..255."""
    with extra("the digits dataset"):
        from sklearn.datasets import load_digits
    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return image_set(images[:, None], digits.target.astype(np.int64), tuple("0123456789"))


def check_labels(path: Path, labels: Array, classes: int | None = None, images: int | None = None) -> None:
    """Raise DataError if there are no labels, or not one for each of ``images``, or one is outside 0..classes-1."""
    if images not in (None, len(labels)):
        raise DataError(f"{path} has {len(labels)} labels for {images} images: give one label an image, or replace it.")
    if not len(labels):
        raise DataError(f"{path} has no labels: a dataset has at least one image.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or (classes is not None and high >= classes):
        known = "" if classes is None else f" to {classes - 1}"
        wrong = f"has the label {low if low < 0 else high}"
        raise DataError(f"{path} {wrong}: number the classes from 0{known}, or replace it.")


def image_set(images: Array, labels: Array, classes: tuple[str, ...]) -> ImageSet:
    """Return an ImageSet of arrays (n, C, H, W) and (n,); copies read-only arrays, which torch does not support."""
    images = np.require(images, np.uint8, ["C", "W"])
    labels = np.require(labels, np.int64, ["C", "W"])
    return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), classes)
