"""MNIST idx, CIFAR batches and digits: right files are read, wrong ones get one sentence with their name."""

import gzip
import os
import pickle
import shlex
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bullettrain.data import DataError, ImageSet, load, root

rng = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder: Path, n: int = 20) -> dict[str, np.ndarray]:
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    arrays = {}
    for part, count in (("train", n), ("t10k", n // 2)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (count, 5, 4), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, count, dtype=np.uint8)
    for name, array in arrays.items():
        (raw / name).write_bytes(idx(array))
    return arrays


def python2_batch(data: np.ndarray, labels: list[int], key: str = "labels") -> bytes:
    """A batch as Python 2 pickled it: byte strings, and numpy's old names."""

    def string(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value  # BINSTRING

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)  # BININT

    dtype = b"cnumpy\ndtype\n(" + string(b"u1") + number(0) + number(1) + b"tR"
    dtype += b"(" + number(3) + string(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0) + b"t" + string(b"b") + b"tR"
    shape = b"(" + b"".join(number(n) for n in data.shape) + b"t"
    array += b"(" + number(1) + shape + dtype + b"I00\n" + string(data.tobytes()) + b"tb"
    items = b"".join(number(y) for y in labels)
    return b"\x80\x02}(" + string(key.encode()) + b"](" + items + b"e" + string(b"data") + array + b"u."


def write_cifar10(folder: Path, n: int = 6) -> np.ndarray:
    """Tiny CIFAR-10 batches; all training pixels."""
    where = folder / "cifar-10-batches-py"
    where.mkdir(parents=True)
    pixels = []
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data = rng.integers(0, 256, (n, 3072), dtype=np.uint8)
        (where / name).write_bytes(python2_batch(data, list(range(n))))
        pixels.append(data)
    meta = {"label_names": [f"class {c}" for c in range(10)], "num_vis": 3072}
    (where / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return np.concatenate(pixels[:5])


def write_cifar100(folder: Path, n: int = 6) -> None:
    where = folder / "cifar-100-python"
    where.mkdir(parents=True)
    for name in ("train", "test"):
        data = rng.integers(0, 256, (n, 3072), dtype=np.uint8)
        (where / name).write_bytes(python2_batch(data, list(range(90, 90 + n)), "fine_labels"))
    meta = {"fine_label_names": [f"fine {c}" for c in range(100)], "coarse_label_names": []}
    (where / "meta").write_bytes(pickle.dumps(meta, protocol=2))


def complains(match: str, name: str, where: Path, split: str = "train") -> str:
    with pytest.raises(DataError, match=match) as caught:
        load(name, split=split, root=where)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    if "bullettrain" in message:
        assert f"run `bullettrain data prepare {name} --data-dir {where}`" in message
    return message


def test_root_is_argument_then_environment_then_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("BULLETTRAIN_DATA", str(tmp_path / "env"))
    assert root(tmp_path) == tmp_path
    assert root(str(tmp_path)) == tmp_path
    assert root(None) == tmp_path / "env"
    monkeypatch.setenv("BULLETTRAIN_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert root(None) == tmp_path / "cache" / "bullettrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert root(None) == tmp_path / ".cache" / "bullettrain"


def test_unknown_names_are_refused(tmp_path):
    for name, said in {"imagenet": "npz:PATH$", "npz:": "npz:PATH$", "MNIST": "did you mean 'mnist'"}.items():
        with pytest.raises(DataError, match=f"there is no dataset '{name}'; there are digits, mnist, .*{said}"):
            load(name, split="train", root=tmp_path)
    complains("split 'val' is unknown", "digits", tmp_path, "val")
    with pytest.raises(DataError, match="only folders of images are resized"):
        load("digits", split="train", image_size=4)


def test_image_sets_check_themselves():
    images, labels = torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 1])
    assert len(ImageSet(images, labels, ("a", "b"))) == 3
    for bad in [(images.float(), labels), (images[0], labels), (images, labels[:2]), (images, labels.int())]:
        with pytest.raises(DataError, match="give"):
            ImageSet(*bad, ("a", "b"))
    with pytest.raises(DataError, match="labels run from 0 to 1, but 1 classes"):
        ImageSet(images, labels, ("a",))


# --- MNIST ---


@pytest.mark.parametrize("packed", [False, True])
def test_mnist(tmp_path, packed):
    arrays = write_mnist(tmp_path)
    if packed:
        for file in (tmp_path / "MNIST" / "raw").iterdir():
            file.with_name(file.name + ".gz").write_bytes(gzip.compress(file.read_bytes()))
            file.unlink()
    for split, part in (("train", "train"), ("test", "t10k")):
        data = load("mnist", split=split, root=tmp_path)
        assert data.images.shape == (len(data), 1, 5, 4)
        assert np.array_equal(data.images[:, 0].numpy(), arrays[f"{part}-images-idx3-ubyte"])
        assert data.labels.tolist() == arrays[f"{part}-labels-idx1-ubyte"].tolist()
        assert data.classes == tuple("0123456789")


def test_wrong_mnist_files_are_named(tmp_path):
    write_mnist(tmp_path)
    raw = tmp_path / "MNIST" / "raw"
    images, labels = raw / "train-images-idx3-ubyte", raw / "train-labels-idx1-ubyte"
    good, good_labels = images.read_bytes(), labels.read_bytes()

    images.write_bytes(good[:-1])
    assert str(images) in complains("is truncated, 415 bytes of 416", "mnist", tmp_path)
    images.write_bytes(good[:10])
    complains("is truncated", "mnist", tmp_path)
    images.write_bytes(good + b"!")
    complains("is too long, 417 bytes of 416", "mnist", tmp_path)
    images.write_bytes(b"\x89PNG....")
    assert str(images) in complains("is not an MNIST idx file", "mnist", tmp_path)
    images.write_bytes(b"")
    complains("is not an MNIST idx file .it begins with nothing", "mnist", tmp_path)
    images.write_bytes(good_labels)
    complains("holds labels where images were expected, as if it were renamed", "mnist", tmp_path)
    images.write_bytes(good)
    labels.write_bytes((raw / "t10k-labels-idx1-ubyte").read_bytes())
    complains("train-labels-idx1-ubyte has 10 labels for 20 images", "mnist", tmp_path)
    labels.write_bytes(idx(np.full(20, 10, np.uint8)))
    assert str(labels) in complains("has the label 10: number the classes from 0 to 9", "mnist", tmp_path)
    labels.write_bytes(idx(np.empty(0, np.uint8)))
    complains("has 0 labels for", "mnist", tmp_path)
    labels.unlink()
    assert str(labels) in complains("is missing", "mnist", tmp_path)
    labels.mkdir()
    complains("cannot be read", "mnist", tmp_path)


def test_wrong_gzip_files_are_named(tmp_path):
    write_mnist(tmp_path)
    images = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    whole = gzip.compress(images.read_bytes())
    images.unlink()
    packed = images.with_name(images.name + ".gz")
    packed.write_bytes(whole[:-20])
    assert str(packed) in complains("is truncated", "mnist", tmp_path)
    packed.write_bytes(b"not gzip")
    assert str(packed) in complains("not a gzip file", "mnist", tmp_path)


# --- CIFAR ---


def test_cifar10(tmp_path):
    pixels = write_cifar10(tmp_path)
    data = load("cifar10", split="train", root=tmp_path)
    assert data.images.shape == (30, 3, 32, 32)
    assert np.array_equal(data.images.reshape(30, -1).numpy(), pixels)
    assert data.labels.tolist() == list(range(6)) * 5
    assert data.classes[3] == "class 3"
    assert len(load("cifar10", split="test", root=tmp_path)) == 6


def test_cifar100(tmp_path):
    write_cifar100(tmp_path)
    data = load("cifar100", split="test", root=tmp_path)
    assert data.images.shape == (6, 3, 32, 32)
    assert data.labels.tolist() == list(range(90, 96))
    assert len(data.classes) == 100


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_batches_pickled_again_by_python_3_are_read(tmp_path, protocol):
    write_cifar10(tmp_path)
    data = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
    batch = pickle.dumps({"data": data, "labels": [1, 2, 3, 4]}, protocol=protocol)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(batch)
    loaded = load("cifar10", split="test", root=tmp_path)
    assert np.array_equal(loaded.images.reshape(4, -1).numpy(), data)
    fortran = pickle.dumps({"data": np.asfortranarray(data), "labels": np.arange(4, dtype=">i4")}, protocol)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(fortran)
    loaded = load("cifar10", split="test", root=tmp_path)
    assert np.array_equal(loaded.images.reshape(4, -1).numpy(), data)
    assert loaded.labels.tolist() == [0, 1, 2, 3]


def test_wrong_cifar_files_are_named(tmp_path):
    write_cifar10(tmp_path)
    write_cifar100(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    batch = folder / "data_batch_3"
    good = batch.read_bytes()
    pixels = np.zeros((6, 3072), np.uint8)

    for end in (0, 1, 5, 60, 200, 5000, len(good) - 1):
        batch.write_bytes(good[:end])
        assert str(batch) in complains("is truncated or not a pickle", "cifar10", tmp_path)
    batch.write_bytes(b"\x1f\x8b this is no pickle")
    complains("is truncated or not a pickle", "cifar10", tmp_path)
    batch.write_bytes((tmp_path / "cifar-100-python" / "train").read_bytes())
    complains("is no cifar10 batch: it holds data, fine_labels", "cifar10", tmp_path)
    batch.write_bytes((folder / "batches.meta").read_bytes())
    complains("is no cifar10 batch: it holds label_names, num_vis", "cifar10", tmp_path)
    batch.write_bytes(pickle.dumps([1, 2]))
    complains("holds a list, not the dictionary", "cifar10", tmp_path)
    batch.write_bytes(python2_batch(pixels[:, :784], [0] * 6))
    complains(r"uint8 data of shape \(6, 784\) where cifar10 has uint8 \(n, 3072\)", "cifar10", tmp_path)
    batch.write_bytes(python2_batch(pixels, [0, 1, 2, 10, 3, 4]))
    complains("has the label 10: number the classes from 0 to 9", "cifar10", tmp_path)
    batch.write_bytes(python2_batch(pixels, [0, 1, 2, -1, 3, 4]))
    complains("has the label -1: number the classes from 0 to 9", "cifar10", tmp_path)
    batch.write_bytes(python2_batch(pixels, [0, 1]))
    complains("has 2 labels for 6 images", "cifar10", tmp_path)
    for labels in (["a"] * 6, [[0], [1, 2]], [0.5] * 6):
        batch.write_bytes(pickle.dumps({"data": pixels, "labels": labels}, protocol=2))
        complains("no list of integers", "cifar10", tmp_path)
    batch.unlink()
    assert str(batch) in complains("is missing", "cifar10", tmp_path)
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["one"]}, protocol=2))
    complains("batches.meta does not hold the 10 'label_names'", "cifar10", tmp_path)
    complains("is missing", "cifar100", tmp_path / "elsewhere")


MENDED = {
    "mnist": ("MNIST/raw/train-images-idx3-ubyte", "MNIST/raw/train-labels-idx1-ubyte"),
    "cifar10": ("cifar-10-batches-py/data_batch_1", "cifar-10-batches-py/batches.meta"),
    "cifar100": ("cifar-100-python/train", "cifar-100-python/meta"),
}


@pytest.mark.parametrize("name", MENDED)
@pytest.mark.parametrize("where", ["there", "my data", "."])
def test_the_command_that_mends_a_file_names_the_folder_that_was_looked_in(tmp_path, monkeypatch, name, where):
    monkeypatch.chdir(tmp_path)
    root = Path(where)
    {"mnist": write_mnist, "cifar10": write_cifar10, "cifar100": write_cifar100}[name](root)
    command = f"bullettrain data prepare {name}"
    for file in MENDED[name]:
        good = (root / file).read_bytes()
        for content in (b"damaged", None):
            if content is None:
                (root / file).unlink()
            else:
                (root / file).write_bytes(content)
            with pytest.raises(DataError) as caught:
                load(name, split="train", root=where)
            assert f"run `{command} --data-dir {shlex.quote(where)}`" in str(caught.value)
            with monkeypatch.context() as patch:
                patch.setenv("BULLETTRAIN_DATA", where)  # looked for there anyway
                with pytest.raises(DataError, match=f"run `{command}`"):
                    load(name, split="train")
        (root / file).write_bytes(good)
    load(name, split="train", root=where)


# --- digits ---


def test_digits_are_split_once_and_for_all():
    from sklearn.datasets import load_digits

    original = load_digits()
    train, test = (load("digits", split=split) for split in ("train", "test"))
    assert (len(train), len(test)) == (1438, 359)
    assert train.images.shape[1:] == (1, 8, 8)
    assert int(train.images.max()) == 255
    spread = np.round(original.images * 255 / 16).astype(np.uint8).reshape(1797, 64)
    together = torch.cat([train.images, test.images]).reshape(1797, 64).numpy()
    assert np.array_equal(spread[np.lexsort(spread.T)], together[np.lexsort(together.T)])
    shares = torch.bincount(test.labels) / torch.bincount(torch.cat([train.labels, test.labels]))
    assert shares.sub(0.2).abs().max() < 0.01
    assert torch.equal(load("digits", split="test").images, test.images)


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'needs scikit-learn: .* pip install "\.\[app\]"'):
        load("digits", split="train")


# --- the real files ---


@pytest.mark.parametrize(
    ("name", "shape", "classes", "first"),
    [
        ("mnist", (1, 28, 28), 10, [5, 0, 4, 1, 9]),
        ("cifar10", (3, 32, 32), 10, [6, 9, 9, 4, 1]),
        ("cifar100", (3, 32, 32), 100, [19, 29, 0, 11, 1]),
    ],
)
def test_the_real_datasets(name, shape, classes, first):
    if not os.environ.get("BULLETTRAIN_DATA"):
        pytest.skip("BULLETTRAIN_DATA is not set: no real datasets to read")
    train, test = (load(name, split=split) for split in ("train", "test"))
    assert len(train) == (60000 if name == "mnist" else 50000)
    assert len(test) == 10000
    assert train.images.shape[1:] == test.images.shape[1:] == shape
    assert train.labels[:5].tolist() == first
    assert train.classes == test.classes
    assert len(train.classes) == classes
    if name != "mnist":
        assert set(torch.bincount(test.labels).tolist()) == {10000 // classes}
