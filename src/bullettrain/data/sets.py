"""Load a dataset by name or path, and split datasets class by class."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bullettrain.data.base import DataError, ImageSet, derive_seed, reading
from bullettrain.data.base import root as find_root
from bullettrain.data.files import read_folder, read_npz
from bullettrain.data.readers import image_set, read_cifar10, read_cifar100, read_digits, read_mnist
from bullettrain.errors import user_path
from bullettrain.validation import check_count, check_known

NAMES = ("digits", "mnist", "cifar10", "cifar100")
OWN = {"folder": "a folder with one folder of images per class", "npz": "an .npz file with arrays x and y"}
"""Datasets of the user: what PATH is in folder:PATH and npz:PATH."""
MAX_SIDE = 8192
TEST_SHARE, TEST_SEED = 0.2, 0  # for datasets without a test set

Split = Literal["train", "test"]


def load(
    name_or_path: str,
    *,
    split: Split,
    root: str | Path | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> ImageSet:
    """Load a dataset.

    Args:
        name_or_path: "digits", "mnist", "cifar10", "cifar100", "folder:PATH" or "npz:PATH". A folder may contain
            PATH/train and PATH/test (or PATH/val), or for npz PATH/train.npz and PATH/test.npz. If it does not, and for
            the digits, a fixed fifth of every class is the test set.
        split: "train" or "test".
        root: folder of the datasets. Default: `bullettrain.data.root`.
        image_size: side, or (H, W), to resize the images of a folder to.

    Raises:
        DataError: the dataset is unknown, missing or damaged.
    """
    if split not in ("train", "test"):
        raise DataError(f"split {split!r} is unknown: there are train and test.")
    kind, _, location = name_or_path.partition(":")
    if name_or_path not in NAMES and not (kind in OWN and location):
        file = os.path.expanduser(name_or_path)  # a common mistake: a path without its prefix
        prefix = "folder" if os.path.isdir(file) else "npz" if os.path.isfile(file) and file.endswith(".npz") else ""
        hint = f"; for this path write {prefix}:{name_or_path}" if prefix else ""
        known = f"there are {', '.join(NAMES)}, folder:PATH and npz:PATH{hint}"
        check_known(name_or_path, NAMES, "there is no dataset", error=DataError, listed=known)
    if image_size is not None and kind != "folder":
        raise DataError(f"an image size was given for {name_or_path}: only folders of images are resized.")
    if kind in OWN:
        path, what = user_path(location), OWN[kind]
        with reading(path, what, f"give {what}", missing=f"name yours with --data {kind}:PATH, {what}"):
            return _load_npz(path, split) if kind == "npz" else _load_folder(path, split, _size(image_size))
    if kind == "digits":
        return _part(read_digits(), split)
    readers = {"mnist": read_mnist, "cifar10": read_cifar10, "cifar100": read_cifar100}
    return readers[kind](find_root(root), split)


def split_validation(data: ImageSet, size: int, seed: int) -> tuple[ImageSet, ImageSet]:
    """Split off ``size`` random images for validation, every class in proportion.

    Returns:
        The other images and the validation images, both in the order of ``data``; for size 0, ``data`` itself and an
        empty set.
    """
    if size and not 0 < size < len(data):
        raise DataError(f"a validation split of {size} images was asked of {len(data)}: choose 0 to {len(data) - 1}.")
    rest, held = stratified(data.labels, size, seed)
    return (data if size == 0 else data.subset(rest)), data.subset(held)


def check_alike(train: ImageSet, test: ImageSet, name: str) -> None:
    """Raise DataError if training and test images differ in size or channels."""
    shapes = tuple(train.images.shape[1:]), tuple(test.images.shape[1:])
    if shapes[0] != shapes[1]:
        raise DataError(f"{name} has training images of {shapes[0]} but test images of {shapes[1]}: give one shape.")


def stratified(labels: Tensor, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Split the indices of labels, int64 (n,), into sorted parts of n - size and size, every class in proportion."""
    n, counts = len(labels), torch.bincount(labels.cpu()).tolist()
    quotas = [size * count // n for count in counts]
    # Images lost by rounding down go to the classes that lost most; ties go to the first class.
    by_loss = sorted(range(len(counts)), key=lambda c: -(size * counts[c] % n))
    for c in by_loss[: size - sum(quotas)]:
        quotas[c] += 1
    generator = torch.Generator().manual_seed(derive_seed(seed, "split"))
    held = torch.zeros(n, dtype=torch.bool)
    for c, quota in enumerate(quotas):
        members = (labels.cpu() == c).nonzero()[:, 0]
        held[members[torch.randperm(len(members), generator=generator)[:quota]]] = True
    held = held.to(labels.device)
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def sample(labels: Tensor, size: int) -> Tensor:
    """Return sorted indices of ``size`` of the labels, int64 (n,), every class in proportion; always the same."""
    return stratified(labels, size, seed=0)[1]


def _part(data: ImageSet, split: Split) -> ImageSet:
    """Return the training or the test part of a dataset without a test set."""
    train, test = stratified(data.labels, round(len(data) * TEST_SHARE), TEST_SEED)
    return data.subset(train if split == "train" else test)


def _load_folder(path: Path, split: Split, image_size: tuple[int, int] | None) -> ImageSet:
    train = path / "train"
    if train.is_dir():
        for test in (path / "test", path / "val"):
            if test.is_dir():
                return read_folder(train if split == "train" else test, like=train, image_size=image_size)
        if any(inside.is_dir() for inside in train.iterdir()):  # otherwise "train" can be a class
            raise DataError(f"{path} has a train but no test or val folder: add one, or give {train} to have it split.")
    return _part(read_folder(path, image_size=image_size), split)


def _load_npz(path: Path, split: Split) -> ImageSet:
    parts = {"all": path}
    if path.is_dir():
        parts = {"train": path / "train.npz", "test": path / "test.npz"}
    arrays = {part: read_npz(file) for part, file in parts.items()}
    # Over both parts, because one part may lack a class.
    highest = max(int(y.max()) for _, y in arrays.values())
    if highest >= sum(len(y) for _, y in arrays.values()):
        raise DataError(f"{path} has the label {highest}, but fewer images: number the classes from 0.")
    classes = tuple(str(c) for c in range(highest + 1))
    sets = {part: image_set(x, y, classes) for part, (x, y) in arrays.items()}
    if "all" in sets:
        return _part(sets["all"], split)
    check_alike(sets["train"], sets["test"], str(path))
    return sets[split]


def _size(image_size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if image_size is None:
        return None
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    for side in (height, width):
        check_count(side, "image_size", least=1, most=MAX_SIDE, error=DataError)
    return height, width


def fingerprint(sets: tuple[ImageSet, ...], *, most: int = 500) -> str:
    """Return a digest of the data: shapes, classes, labels, and about ``most`` images of each set."""
    digest = hashlib.blake2b(digest_size=16)
    for images in sets:
        digest.update(repr((tuple(images.images.shape), images.classes)).encode())
        digest.update(images.labels.cpu().numpy().tobytes())
        digest.update(images.images[:: max(1, len(images) // most)].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
