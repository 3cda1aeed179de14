"""Shared by all data modules: the error, the image set, and the folder of the datasets."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bullettrain.errors import UserError, raised_as, user_path
from bullettrain.validation import described

ENVIRONMENT = "BULLETTRAIN_DATA"
FOLDERS = {
    "mnist": Path("MNIST", "raw"),
    "cifar10": Path("cifar-10-batches-py"),
    "cifar100": Path("cifar-100-python"),
}
"""Folder of each dataset under the root, the same as in torchvision."""
MAX_EXPANSION, SMALL_FILE = 50, 1 << 28
"""A compressed file may expand to 50 times its size, or to 256 MiB if that is more."""


class DataError(UserError):
    """A dataset cannot be read. The message is one sentence: the file, what is wrong with it, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(re.sub(r"[\x00-\x1f\x7f]+", "?", message))  # one line, even if a path has control characters


@contextmanager
def reading(path: Path, what: str, fix: str, *, missing: str | None = None) -> Iterator[None]:
    """Turn every exception while reading ``path`` into a DataError.

    Args:
        path: the file or folder. Pipes and devices are rejected before they are opened.
        what: expected content, such as "a pickle".
        fix: what the user can do if the content is different, such as "save it again".
        missing: what the user can do if the file is missing. Default: ``fix``.

    Raises:
        DataError: reading failed, or ran out of memory.
    """
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise DataError(f"{path} is a pipe, socket or device, not a file: remove it.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy and Pillow warn about unusual files
            yield
    except (DataError, ImportError):
        raise
    except FileNotFoundError:
        raise DataError(f"{path} is missing: {missing or fix}.") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise DataError(f"{error.filename or path} cannot be read ({error.strerror}): {fix}.") from error
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        reason = reason.replace(repr(str(path)), "it")
        raise DataError(f"{path} is truncated or not {what} ({reason:.200}): {fix}.") from error


def unpacked_limit(path: Path) -> int:
    """Return how many bytes the compressed file ``path`` may expand to."""
    return max(SMALL_FILE, MAX_EXPANSION * path.stat().st_size)


def check_unpacked(path: Path, size: int) -> None:
    """Raise DataError if a compressed file that expands to ``size`` bytes is beyond the limit."""
    if size > (limit := unpacked_limit(path)):
        raise DataError(f"{path} unpacks to more than {limit >> 20} MiB, far beyond its own size: it is not a dataset.")


def writing(folder: Path, how: str = "") -> AbstractContextManager[None]:
    """Turn an OSError while writing to ``folder`` into a DataError; ``how`` tells how to choose another folder."""

    def message(error: OSError) -> str:
        path = Path(error.filename or folder)
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            blocking = next((part for part in (path, *path.parents) if part.is_file()), path)
            return f"{blocking} is a file, not a folder: choose another folder{how}."
        return f"{path} cannot be written ({error.strerror}): free disk space, or choose another folder{how}."

    return raised_as(DataError, message, OSError)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images of one size, in memory.

    Attributes:
        images: uint8 (n, C, H, W).
        labels: int64 (n,), indices into ``classes``.
        classes: names of the classes.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        images, labels, count = self.images, self.labels, len(self.classes)
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise DataError(f"images are {described(images)}: give uint8 (n, C, H, W).")
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise DataError(f"labels are {described(labels)}: give int64 ({len(images)},), one for each image.")
        low, high = map(int, labels.aminmax()) if len(labels) else (0, 0)
        if len(labels) and (low < 0 or high >= count):
            raise DataError(f"labels run from {low} to {high}, but {count} classes have labels from 0 to {count - 1}.")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.images.shape[1:]))
        return f"ImageSet({len(self)} images of {shape}, {len(self.classes)} classes, on {self.images.device})"

    def subset(self, indices: Tensor) -> ImageSet:
        """Return the images at ``indices``, int64 (m,), in that order."""
        return ImageSet(self.images[indices], self.labels[indices], self.classes)

    def to(self, device: torch.device | str) -> ImageSet:
        """Return the set on ``device``; returns itself if it is already there."""
        images, labels = self.images.to(device), self.labels.to(device)
        same = images is self.images and labels is self.labels
        return self if same else ImageSet(images, labels, self.classes)


def root(data_dir: str | Path | None = None) -> Path:
    """Return the folder of the datasets: ``data_dir``, or $BULLETTRAIN_DATA, or the user's cache folder."""
    if data_dir is not None or os.environ.get(ENVIRONMENT):
        return user_path(data_dir if data_dir is not None else os.environ[ENVIRONMENT])
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "bullettrain"


def derive_seed(*parts: int | str) -> int:
    """Hash a tuple to the seed of a generator, so that similar tuples give unrelated streams."""
    digest = hashlib.blake2b("/".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def elsewhere(base: Path) -> list[str]:
    """Return the command-line option that selects the root ``base``; empty for the default."""
    return [] if base == root() else ["--data-dir", str(base)]


def prepare_command(name: str, base: Path) -> str:
    """Return the command that prepares a dataset under the root ``base``."""
    return shlex.join(["bullettrain", "data", "prepare", name, *elsewhere(base)])


def renewed_by(path: Path, name: str) -> str:
    """Return the command that restores the file ``path`` of dataset ``name``."""
    return prepare_command(name, path.parents[len(FOLDERS[name].parts)])


def reading_original(path: Path, name: str, what: str) -> AbstractContextManager[None]:
    """Return `reading` for a file of dataset ``name``, which can be downloaded again."""
    run = f"run `{renewed_by(path, name)}`"
    elsewhere = f"put the file there yourself, or name the folder that has it with --data-dir or {ENVIRONMENT}"
    return reading(path, what, f"delete it and {run}", missing=f"{run}, {elsewhere}")
