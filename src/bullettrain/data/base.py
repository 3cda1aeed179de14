"""What every part of the data package shares: the error, the image set, and where datasets are looked for."""

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

from bullettrain.errors import UserError, user_path
from bullettrain.validation import described

ENVIRONMENT = "BULLETTRAIN_DATA"
FOLDERS = {
    "mnist": Path("MNIST", "raw"),
    "cifar10": Path("cifar-10-batches-py"),
    "cifar100": Path("cifar-100-python"),
}
"""Where a dataset's files lie under the root, as torchvision has them."""
MAX_EXPANSION, SMALL_FILE = 50, 1 << 28
"""A compressed file may unpack to so many times its size, and to 256 MiB in any case."""


class DataError(UserError):
    """A dataset that cannot be read: one sentence with the file, what is wrong with it, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(re.sub(r"[\x00-\x1f\x7f]+", "?", message))  # one line, whatever a file or a path is called


@contextmanager
def reading(path: Path, what: str, mend: str, *, missing: str | None = None) -> Iterator[None]:
    """The boundary around every reader: whatever goes wrong inside comes out as a DataError.

    Args:
        path: the file or folder that is read. A FIFO or a device is refused before it is opened.
        what: what it should be, "a pickle".
        mend: what to do where it is not, "save it again".
        missing: what to do where there is nothing. Default: ``mend``.

    Raises:
        DataError: also where there is no memory for what the file promises.
    """
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise DataError(f"{path} is no file but a pipe, socket or device, and was not opened: remove it.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numpy and Pillow, about oddities of the file
            yield
    except (DataError, ImportError):
        raise
    except FileNotFoundError:
        raise DataError(f"{path} is missing: {missing or mend}.") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise DataError(f"{error.filename or path} cannot be read ({error.strerror}): {mend}.") from error
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        reason = reason.replace(repr(str(path)), "it")
        raise DataError(f"{path} is truncated or not {what} ({reason:.200}): {mend}.") from error


def unpacked_limit(path: Path) -> int:
    """Bytes that the compressed file ``path`` may unpack to; an honest one has fewer."""
    return max(SMALL_FILE, MAX_EXPANSION * path.stat().st_size)


def check_unpacked(path: Path, size: int) -> None:
    """Refuse a compressed file that unpacks to ``size`` bytes, where that is too many."""
    if size > (limit := unpacked_limit(path)):
        raise DataError(f"{path} unpacks to more than {limit >> 20} MiB, far beyond its own size: it is no dataset.")


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

    def subset(self, indices: Tensor) -> ImageSet:
        """The images at `indices`, int64 (m,), in that order."""
        return ImageSet(self.images[indices], self.labels[indices], self.classes)

    def to(self, device: torch.device | str) -> ImageSet:
        """The same set on `device`; itself when it is there already."""
        images, labels = self.images.to(device), self.labels.to(device)
        same = images is self.images and labels is self.labels
        return self if same else ImageSet(images, labels, self.classes)


def root(data_dir: str | Path | None = None) -> Path:
    """The folder datasets are looked for in: `data_dir`, else $BULLETTRAIN_DATA, else the user's cache."""
    if data_dir is not None or os.environ.get(ENVIRONMENT):
        return user_path(data_dir if data_dir is not None else os.environ[ENVIRONMENT])
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "bullettrain"


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


def reading_original(path: Path, name: str, what: str) -> AbstractContextManager[None]:
    """`reading` a file of dataset `name`, which can be fetched again."""
    run = f"run `{renewed_by(path, name)}`"
    elsewhere = f"put the file there yourself, or name the folder that has it with --data-dir or {ENVIRONMENT}"
    return reading(path, what, f"delete it and {run}", missing=f"{run}, {elsewhere}")
