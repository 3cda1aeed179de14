"""Every reader of a file: how to write a small file for it, and how it is read."""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import bullettrain
from bullettrain.corruptions.files import open_images, read_labels
from bullettrain.data import load
from bullettrain.evaluation.results import Store
from bullettrain.loading import read_state
from bullettrain.reporting.run import read_contents
from bullettrain.run_folder import CHECKPOINT, RunFolder
from bullettrain.training.recipe_files import read_recipe
from test_data_readers import write_cifar10, write_cifar100, write_mnist


@dataclass(frozen=True)
class Reader:
    """A file that is damaged, and who reads it."""

    name: str
    file: str
    """The file under the folder that ``write`` fills."""
    write: Callable[[Path], object] | None = None
    """None: the folder is a copy of a finished run."""
    read: Callable[[Path], object] = list
    """Given that folder."""
    share: int = 1
    """Of the mutations."""


def _pack_mnist(folder: Path) -> None:
    write_mnist(folder)
    for file in (folder / "MNIST" / "raw").iterdir():
        file.with_name(file.name + ".gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()


def _write_npz(folder: Path, *, save: Callable[..., None] = np.savez, kind: str = "uint8") -> None:
    save(folder / "mine.npz", x=np.random.default_rng(0).random((4, 3, 5, 5)).astype(kind), y=np.arange(4) % 2)


def _write_images(folder: Path, suffix: str, mode: str = "RGB", **options: object) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for index in range(2):
            Image.fromarray(pixels).convert(mode).save(folder / name / f"{index}.{suffix}", **options)


def _write_corrupted(folder: Path) -> None:
    np.save(folder / "fog.npy", np.zeros((10, 32, 32, 3), np.uint8))
    np.save(folder / "labels.npy", np.tile(np.array([0, 1], np.uint8), 5))


def _dataset(name: str, file: str, write: Callable[[Path], object], share: int) -> Reader:
    """The test images of a dataset that is fetched."""
    return Reader(f"{name} {Path(file).name}", file, write, lambda root: load(name, split="test", root=root), share)


def _npz(name: str, write: Callable[[Path], object], share: int) -> Reader:
    return Reader(name, "mine.npz", write, lambda folder: load(f"npz:{folder / 'mine.npz'}", split="train"), share)


def _images(suffix: str, share: int, **options: object) -> Reader:
    """A folder of images, of which the first is damaged; it decides for all."""
    write = partial(_write_images, suffix=suffix, **options)
    return Reader(
        suffix, f"cat/0.{suffix}", write, lambda folder: load(f"folder:{folder}", split="train", image_size=8), share
    )


def _write_weights(folder: Path) -> None:
    torch.save({"model": {"module.weight": torch.ones(3, 4), "module.bias": torch.zeros(3)}}, folder / "other.pt")


_cifar10, _cifar100 = partial(write_cifar10, n=1), partial(write_cifar100, n=1)
DATA = [
    _dataset("cifar10", "cifar-10-batches-py/test_batch", _cifar10, 4),
    _dataset("cifar10", "cifar-10-batches-py/batches.meta", _cifar10, 2),
    _dataset("cifar100", "cifar-100-python/test", _cifar100, 2),
    _dataset("cifar100", "cifar-100-python/meta", _cifar100, 1),
    _dataset("mnist", "MNIST/raw/t10k-images-idx3-ubyte", write_mnist, 2),
    _dataset("mnist", "MNIST/raw/t10k-labels-idx1-ubyte", write_mnist, 1),
    _dataset("mnist", "MNIST/raw/t10k-images-idx3-ubyte.gz", _pack_mnist, 2),
    _npz("npz", _write_npz, 4),
    _npz("npz, compressed", partial(_write_npz, save=np.savez_compressed), 2),
    _npz("npz of float32", partial(_write_npz, kind="float32"), 2),
    _images("png", 2),
    _images("png", 1, mode="P"),
    _images("jpg", 2),
    _images("webp", 2),
    _images("bmp", 1),
    _images("gif", 1),
    _images("tiff", 2, compression="tiff_lzw"),
    _images("tga", 1),
    _images("jp2", 1),
    Reader("fog.npy", "fog.npy", _write_corrupted, lambda folder: open_images(folder / "fog.npy", 10).sum(), 2),
    Reader("labels.npy", "labels.npy", _write_corrupted, read_labels, 2),
]
"""The readers of datasets."""


RUN = [
    Reader("config.yaml as a recipe", "config.yaml", read=lambda folder: read_recipe(str(folder / "config.yaml"))),
    Reader("config.yaml", "config.yaml", read=lambda folder: RunFolder(folder).config()),
    Reader("metrics.jsonl", "metrics.jsonl", read=lambda folder: RunFolder(folder).records()),
    Reader("metrics.jsonl in a report", "metrics.jsonl", read=read_contents, share=2),
    Reader("evaluation.json", "evaluation.json", read=Store, share=2),
    Reader("weights", "best.safetensors", read=bullettrain.load, share=2),
    Reader("checkpoint", CHECKPOINT, read=lambda folder: RunFolder(folder).load(), share=2),
    Reader("other.pt", "other.pt", _write_weights, lambda folder: read_state(folder / "other.pt")),
    Reader("samples.safetensors", "samples.safetensors", read=read_contents),
]
"""The readers of what a run leaves; a new one is a line here."""
