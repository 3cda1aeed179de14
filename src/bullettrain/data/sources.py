"""The datasets that can be downloaded: their files, URLs and digests."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from bullettrain.data.base import DataError, reading
from bullettrain.data.base import root as find_root
from bullettrain.data.readers import idx_bytes, idx_path, read_batch, read_names
from bullettrain.validation import check_known

Kind = Literal["bytes", "idx", "batch", "names"]
State = Literal["here", "partly", "missing", "built in", "needs extra"]


@dataclass(frozen=True)
class File:
    """A file of a dataset.

    Attributes:
        path: path under the root.
        digest: expected digest of its content.
        kind: what is hashed. "bytes": md5 of the file. "idx": md5 of the uncompressed file. "batch": sha256 of the
            pixels and labels of a CIFAR-10 batch. "names": sha256 of the class names of CIFAR-10. The last two do not
            depend on how the content was pickled.
    """

    path: str
    digest: str
    kind: Kind = "bytes"


@dataclass(frozen=True)
class Archive:
    """A published archive: its path under the root, URLs, md5, and the files in it."""

    path: str
    urls: tuple[str, ...]
    md5: str
    files: tuple[File, ...]


@dataclass(frozen=True)
class Source:
    """A dataset that can be downloaded."""

    title: str
    archives: tuple[Archive, ...]

    @property
    def files(self) -> tuple[File, ...]:
        """The files of all archives."""
        return tuple(file for archive in self.archives for file in archive.files)


class FileCheck(NamedTuple):
    """Result of `verify` for one file."""

    path: Path
    state: Literal["ok", "missing", "wrong", "unreadable"]
    detail: str

    @property
    def ok(self) -> bool:
        """Whether the file exists and has the right content."""
        return self.state == "ok"


class Availability(NamedTuple):
    """Result of `available` for one dataset."""

    name: str
    title: str
    state: State
    missing: tuple[Path, ...] = ()


_MNIST_HOSTS = "https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"
# The first host redirects to the second.
_CIFAR_HOSTS = "https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/"
# md5 of the published .gz file and of its uncompressed content.
_MNIST = {
    "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
}
# sha256 of the content: (n, 3072) pixels and then n labels, one byte each; names joined by newlines.
_CIFAR10 = [
    File(f"cifar-10-batches-py/{name}", sha256, "names" if name == "batches.meta" else "batch")
    for name, sha256 in {
        "data_batch_1": "ba52cb2d72c412975d7556bb26bd094956f1c002d1937053f6f1252f2ac17114",
        "data_batch_2": "350ff9000489d02f2568c0dcf4912ffdbae9e50932147905fb1b8159ad54f0ac",
        "data_batch_3": "a2b8653fc457df407af6c38b7e0d1a12530f3b5f81fce9f81516efd065daf722",
        "data_batch_4": "133e6292c377755074c305db8a684d48d5397372cb0aba34f52b4335eab35d97",
        "data_batch_5": "eb08cdc11fd1267ef871cf4790f193684b3f556d13317be68f4eb374a078ea87",
        "test_batch": "9a4c74f5c8b6f2c4e13d3a1dfb43a5a8cda8a9da515e99fd620d2013a1a6287a",
        "batches.meta": "bb3914949cecedee6d1257f7f5fdb8f43fa3b2c8095fd1763161caf1b873fe59",
    }.items()
]
_CIFAR100 = [
    File(f"cifar-100-python/{name}", md5)
    for name, md5 in {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
    }.items()
]


def _archive(hosts: tuple[str, ...], path: str, md5: str, files: Iterable[File]) -> Archive:
    return Archive(path, tuple(host + Path(path).name for host in hosts), md5, tuple(files))


SOURCES: dict[str, Source] = {
    "mnist": Source(
        "MNIST, 60,000 + 10,000 handwritten digits, 28x28 grey",
        tuple(
            _archive(_MNIST_HOSTS, f"MNIST/raw/{name}.gz", packed, [File(f"MNIST/raw/{name}", md5, "idx")])
            for name, (packed, md5) in _MNIST.items()
        ),
    ),
    "cifar10": Source(
        "CIFAR-10, 50,000 + 10,000 photographs in 10 classes, 32x32 colour",
        (_archive(_CIFAR_HOSTS, "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", _CIFAR10),),
    ),
    "cifar100": Source(
        "CIFAR-100, 50,000 + 10,000 photographs in 100 classes, 32x32 colour",
        (_archive(_CIFAR_HOSTS, "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", _CIFAR100),),
    ),
}


def source(name: str) -> Source:
    """Return the source of dataset ``name``. Raises DataError if it cannot be downloaded."""
    known = f"{', '.join(SOURCES)} can be prepared and verified"
    if name.startswith(("folder:", "npz:")):
        raise DataError(f"dataset {name!r} is your own: {known}.")
    return SOURCES[check_known(name, SOURCES, "there is no dataset", error=DataError, listed=known)]


def verify(name: str, root: str | Path | None = None) -> list[FileCheck]:
    """Check every file of a dataset against its digest. The digits, a part of scikit-learn, have no files."""
    return [] if name == "digits" else [check(find_root(root), file) for file in source(name).files]


def _place(root: Path, file: File) -> Path:
    return idx_path(root / file.path) if file.kind == "idx" else root / file.path


def check(root: Path, file: File) -> FileCheck:
    """Check one file under ``root`` against its digest."""
    path = _place(root, file)
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        return FileCheck(path, "missing", "there is no such file.")
    try:
        actual = digest(path, file.kind)
    except DataError as error:
        return FileCheck(path, "unreadable", str(error))
    if actual != file.digest:
        what = {"bytes": "md5", "idx": "md5 unpacked"}.get(file.kind, "sha256 of its content")
        return FileCheck(path, "wrong", f"its {what} is {actual}, the original's {file.digest}.")
    return FileCheck(path, "ok", "its digest is right.")


def digest(path: Path, kind: Kind) -> str:
    """Return the digest of a file, computed as its `File.kind` says."""
    if kind == "bytes":
        return md5_of(path)
    if kind == "idx":
        return hashlib.md5(idx_bytes(path), usedforsecurity=False).hexdigest()
    if kind == "names":
        return hashlib.sha256("\n".join(read_names(path, "label_names", 10, "cifar10")).encode()).hexdigest()
    images, labels = read_batch(path, "labels", 10, "cifar10")
    content = hashlib.sha256(np.ascontiguousarray(images).data)
    content.update(labels.astype(np.uint8).tobytes())
    return content.hexdigest()


def md5_of(path: Path) -> str:
    """Return the md5 of a file."""
    md5 = hashlib.md5(usedforsecurity=False)
    with reading(path, "a file", "make it readable, or delete it"), path.open("rb") as file:
        while piece := file.read(1 << 20):
            md5.update(piece)
    return md5.hexdigest()


def available(root: str | Path | None = None) -> list[Availability]:
    """List which datasets are under the root. Only looks for the files; `verify` checks their content."""
    base = find_root(root)
    built_in = importlib.util.find_spec("sklearn") is not None
    title = "scikit-learn's digits, 1,438 + 359 of them, 8x8 grey"
    datasets = [Availability("digits", title, "built in" if built_in else "needs extra")]
    for name, entry in SOURCES.items():
        missing = tuple(path for file in entry.files if not os.path.isfile(path := _place(base, file)))
        state: State = "here" if not missing else "partly" if len(missing) < len(entry.files) else "missing"
        datasets.append(Availability(name, entry.title, state, missing))
    return datasets
