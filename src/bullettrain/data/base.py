"""What every part of the data package shares: the error, the image set, and where datasets are looked for."""

from __future__ import annotations

import hashlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bullettrain.errors import UserError, user_path

ENVIRONMENT = "BULLETTRAIN_DATA"
FOLDERS = {
    "mnist": Path("MNIST", "raw"),
    "cifar10": Path("cifar-10-batches-py"),
    "cifar100": Path("cifar-100-python"),
}
"""Where a dataset's files lie under the root, as torchvision has them."""


class DataError(UserError):
    """A dataset that cannot be read: one sentence with the file, what is wrong with it, and what to do."""


def unwritable(error: OSError, folder: Path, how: str = "") -> DataError:
    """What to say where nothing can be written into ``folder``; ``how`` another one is chosen."""
    path = Path(error.filename or folder)
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        blocking = next((part for part in (path, *path.parents) if part.is_file()), path)
        return DataError(f"{blocking} is in the way, and no folder: choose another one{how}.")
    what = f"{path} cannot be written ({error.strerror})"
    return DataError(f"{what}: free some room, or choose another folder{how}.")


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images of one size, as they lie in memory.

    images: uint8 (n, C, H, W); labels: int64 (n,), each an index into classes.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise DataError(
                f"images are {self.images.dtype} of shape {tuple(self.images.shape)}: give uint8 (n, C, H, W)."
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise DataError(
                f"labels are {self.labels.dtype} of shape {tuple(self.labels.shape)}:"
                f" give int64 ({len(self.images)},), one for each image."
            )
        if len(self.labels):
            low, high = (int(end) for end in self.labels.aminmax())
            if low < 0 or high >= len(self.classes):
                raise DataError(
                    f"labels run from {low} to {high}, but {len(self.classes)} classes"
                    f" need labels from 0 to {len(self.classes) - 1}."
                )

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: Tensor) -> ImageSet:
        """The images at `indices`, int64 (m,), in that order."""
        return ImageSet(self.images[indices], self.labels[indices], self.classes)

    def to(self, device: torch.device | str) -> ImageSet:
        """The same set on `device`; itself when it is there already."""
        images, labels = self.images.to(device), self.labels.to(device)
        if images is self.images and labels is self.labels:
            return self
        return ImageSet(images, labels, self.classes)


def root(data_dir: str | Path | None = None) -> Path:
    """The folder datasets are looked for in: `data_dir`, else $BULLETTRAIN_DATA, else the user's cache."""
    if data_dir is not None:
        return user_path(data_dir)
    if os.environ.get(ENVIRONMENT):
        return user_path(os.environ[ENVIRONMENT])
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "bullettrain"


def derive_seed(*parts: int | str) -> int:
    """A generator's seed from a tuple: hashed, because neighbours must give unrelated streams."""
    digest = hashlib.blake2b("/".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def elsewhere(base: Path) -> list[str]:
    """The option that a command needs to look under the root `base`."""
    return [] if base == root() else ["--data-dir", str(base)]


def prepare_command(name: str, base: Path) -> str:
    """What to type to prepare a dataset under the root `base`."""
    return shlex.join(["bullettrain", "data", "prepare", name, *elsewhere(base)])


def renewed_by(path: Path, name: str) -> str:
    """What to type to have the file `path` of dataset `name` made again."""
    return prepare_command(name, path.parents[len(FOLDERS[name].parts)])


def missing(path: Path, name: str) -> DataError:
    """The error for a file of dataset `name` that is not at `path`."""
    return DataError(
        f"{path} is missing: run `{renewed_by(path, name)}`, put the file there yourself,"
        f" or name the folder that has it with --data-dir or {ENVIRONMENT}."
    )


def read_bytes(path: Path, name: str) -> bytes:
    """The bytes of a file of dataset `name`, or a DataError that says why there are none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise missing(path, name) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
