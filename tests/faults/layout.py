"""The files that the catalogue of bad inputs names: a folder of what goes wrong."""

import gzip
import io
import os
import pickle
import shutil
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from test_data_readers import idx, python2_batch, write_cifar10

LONG = "n" * 300
"""A name that no file system takes."""


class Touches:
    """Pickles as a command."""

    def __reduce__(self):
        return os.system, ("touch executed",)


def lay_out(run: Path) -> None:
    """Fill the current folder; ``run`` is a finished run."""
    Path("text.txt").write_text("some text\n")
    Path("empty").touch()
    Path("folder").mkdir()
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    _runs(run)
    _recipes()
    _arrays()
    _images()
    _datasets()
    _weights(run)


def _runs(run: Path) -> None:
    shutil.copytree(run, "run")
    broken = {"config.yaml": b"{", "state.pt": b"PK", "best.safetensors": b"\xff" * 99, "evaluation.json": b"[" * 9999}
    for name, content in broken.items():
        folder = Path(f"broken-{name.partition('.')[0]}")
        shutil.copytree(run, folder)
        (folder / name).write_bytes(content)
    for name in ("config.yaml", "best.safetensors"):
        folder = Path(f"no-{name.partition('.')[0]}")
        shutil.copytree(run, folder)
        (folder / name).unlink()
    for name in ("last", "averaged"):
        Path("no-best", f"{name}.safetensors").unlink()


def _recipes() -> None:
    texts = {
        "bracket.yaml": "{a: [",
        "list.yaml": "- 3",
        "deep.yaml": "[" * 5000,
        "deep-map.yaml": "{a: " * 5000,
        "alias.yaml": "a: &a [x, x, x]\n"
        + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)),
        "object.yaml": "!!python/object/apply:os.system ['touch executed']",
        "unknown.yaml": "training: {epoch: 3}",
        "word.yaml": "training: {epochs: many}",
        "section.yaml": "training: 3",
        "tab.yaml": "training:\n\tepochs: 3",
        "infinite.yaml": "optimizer: {lr: .inf}",
        "nan.yaml": "optimizer: {lr: .nan}",
        "recipe.yaml": "recipe: [3]",
        "function.yaml": "network: {name: 'os:abort'}",
        "negative.yaml": "training: {batch_size: -5}",
        "large.yaml": "training: {epochs: 1" + "0" * 400 + "}",
        "date.yaml": "training: {epochs: 2020-01-01}",
        "key.yaml": "? [1, 2]\n: 3",
    }
    for name, text in texts.items():
        Path(name).write_text(text)
    Path("latin.yaml").write_bytes(b"recipe: caf\xe9")
    Path("null.yaml").write_bytes(b"recipe: \x00")
    Path("binary.yaml").write_bytes(bytes(range(256)))


def _npz(name: str, header: bytes | None = None, **arrays: object) -> None:
    np.savez(name, **arrays)
    if header is not None:
        with zipfile.ZipFile(name, "w") as archive:
            for key in ("x", "y"):
                archive.writestr(f"{key}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"1234")


def _arrays() -> None:
    x, y = np.zeros((10, 4, 4), np.uint8), np.arange(10) % 2
    _npz("good.npz", x=x, y=y)
    _npz("no-y.npz", x=x)
    _npz("short.npz", x=x, y=y[:3])
    _npz("objects.npz", x=np.array([{}] * 10, dtype=object), y=y)
    _npz("words.npz", x=x, y=y.astype(str))
    _npz("minus.npz", x=x, y=y - 1)
    _npz("wide.npz", x=np.zeros((10, 4, 4, 5), np.uint8), y=y)
    _npz("bright.npz", x=np.full((10, 4, 4), 255.0), y=y)
    _npz("nan.npz", x=np.full((10, 4, 4), np.nan), y=y)
    _npz("none.npz", x=x[:0], y=y[:0])
    _npz("sparse.npz", x=x, y=y * 1000)
    _npz("huge.npz", b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 9, 9), }\n")
    _npz("negative.npz", b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1, -2, -2), }\n")
    _npz("nested.npz", b"(" * 5000)
    Path("cut.npz").write_bytes(Path("good.npz").read_bytes()[:-60])
    with zipfile.ZipFile("bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as member:
        for _ in range(300):
            member.write(bytes(1 << 20))
    with zipfile.ZipFile("bomb.npz", "a") as archive:
        archive.writestr("y.npy", b"")


def _png(height: int, width: int) -> bytes:
    """A PNG whose header promises so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


def _images() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "png")
    good = buffer.getvalue()
    grey = io.BytesIO()
    Image.new("L", (8, 8)).save(grey, "png")
    large = io.BytesIO()
    Image.new("RGB", (9, 9)).save(large, "png")
    Path("good.png").write_bytes(good)
    Path("cut.png").write_bytes(good[:-30])
    Path("bomb.png").write_bytes(_png(9000, 9000))
    Path("bigger-bomb.png").write_bytes(_png(60000, 60000))
    Path("script.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n")
    Path("deep.png").write_bytes(_sixteen_bits())
    seconds = {
        "of-text": b"text",
        "of-cut": good[:-30],
        "of-bomb": _png(9000, 9000),
        "of-nothing": b"",
        "of-sizes": large.getvalue(),
        "of-deep": _sixteen_bits(),
    }
    for name, second in seconds.items():
        _classes(Path(name), good)
        Path(name, "dog", "1.png").write_bytes(second)
    _classes(Path("of-pipe"), good)
    os.mkfifo("of-pipe/dog/1.png")
    _classes(Path("of-loop"), good)
    Path("of-loop/dog/1.png").symlink_to("1.png")
    _classes(Path("of-folder"), good)
    Path("of-folder/dog/1.png").mkdir()
    _classes(Path("of-device"), good)
    Path("of-device/dog/1.png").symlink_to("/dev/zero")
    _classes(Path("grey-colour"), grey.getvalue())
    Path("grey-colour/dog/1.png").write_bytes(good)
    _classes(Path("half/train"), good)
    for name, first, second in (("two-sizes", good, large.getvalue()), ("two-colours", grey.getvalue(), good)):
        _classes(Path(name, "train"), first)
        _classes(Path(name, "test"), second)
    _classes(Path("other-classes/train"), good)
    _classes(Path("other-classes/test"), good)
    Path("other-classes/test/zebra").mkdir()
    Path("one-class/cat").mkdir(parents=True)
    Path("no-images/cat").mkdir(parents=True)
    Path("no-images/dog").mkdir()


def _sixteen_bits() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(buffer, "png")
    return buffer.getvalue()


def _classes(folder: Path, image: bytes) -> None:
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        (folder / name / "0.png").write_bytes(image)


def _datasets() -> None:
    batches = {
        "cifar-text": b"text",
        "cifar-cut": python2_batch(np.zeros((2, 3072), np.uint8), [0, 1])[:-40],
        "cifar-command": pickle.dumps({"data": Touches(), "labels": [1]}, 2),
        "cifar-memo": b"\x80\x02}r\xff\xff\xff\x7f.",
        "cifar-keys": b"\x80\x02}K\x01\x85" + b"2\x86" * 50 + b"K\x01s.",  # a tuple of twice a tuple of twice …
        "cifar-buffer": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        "cifar-ragged": pickle.dumps({"data": [[1], [1, 2]], "labels": [1, 2]}, 2),
        "cifar-ragged-labels": pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [[1], [1, 2]]}, 2),
        "cifar-shape": pickle.dumps({"data": np.zeros((2, 7), np.uint8), "labels": [1, 2]}, 2),
        "cifar-labels": python2_batch(np.zeros((2, 3072), np.uint8), [0, 99]),
        "cifar-list": pickle.dumps([1], 2),
        "cifar-empty": b"",
    }
    for name, batch in batches.items():
        write_cifar10(Path(name), n=1)
        Path(name, "cifar-10-batches-py", "data_batch_1").write_bytes(batch)
    write_cifar10(Path("cifar-pipe"), n=1)
    Path("cifar-pipe/cifar-10-batches-py/data_batch_1").unlink()
    os.mkfifo("cifar-pipe/cifar-10-batches-py/data_batch_1")
    images = "train-images-idx3-ubyte"
    files = {
        "mnist-text": (images, b"text"),
        "mnist-cut": (images, idx(np.zeros((3, 5, 5), np.uint8))[:-1]),
        "mnist-huge": (images, struct.pack(">IIII", 0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1)),
        "mnist-labels": (images, idx(np.zeros(3, np.uint8))),
        "mnist-more": (images, idx(np.zeros((4, 5, 5), np.uint8))),
        "mnist-packed-text": (f"{images}.gz", b"text"),
        "mnist-packed-cut": (f"{images}.gz", gzip.compress(idx(np.zeros((3, 5, 5), np.uint8)))[:-9]),
        "mnist-packed-bomb": (f"{images}.gz", gzip.compress(bytes(300 << 20), 1)),
    }
    for name, (file, content) in files.items():
        folder = Path(name, "MNIST", "raw")
        folder.mkdir(parents=True)
        for part in ("train", "t10k"):
            (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(np.zeros((3, 5, 5), np.uint8)))
            (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.zeros(3, np.uint8)))
        (folder / images).unlink()
        (folder / file).write_bytes(content)


def _weights(run: Path) -> None:
    good = (run / "best.safetensors").read_bytes()
    Path("cut.safetensors").write_bytes(good[:-500])
    Path("head.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + good[8:])
    save_file({"weight": torch.ones(2)}, "other.safetensors")
    save_file({"weight": torch.ones(2)}, "words.safetensors", {"bullettrain": '{"network": 3}'})
    save_file({"weight": torch.ones(2)}, "deep.safetensors", {"bullettrain": "[" * 5000})
    network = '{"network": {"name": "%s", "num_classes": %s, "channels": 1, "image_size": 8}}'
    save_file({"weight": torch.ones(2)}, "function.safetensors", {"bullettrain": network % ("os:abort", 10)})
    save_file({"weight": torch.ones(2)}, "classes.safetensors", {"bullettrain": network % ("small-cnn", 10**12)})
    save_file({"weight": torch.ones(2)}, "unknown.safetensors", {"bullettrain": network % ("large-cnn", 10)})
    torch.save({"weight": torch.ones(2)}, "other.pt")
    torch.save([1, 2], "list.pt")
    Path("command.pt").write_bytes(pickle.dumps(Touches(), 2))
    Path("cut.pt").write_bytes(Path("other.pt").read_bytes()[:-100])
    Path("baseline.json").write_text("[1, 2]")
    Path("deep.json").write_text("[" * 99999)
    Path("fog.json").write_text('{"fog": ["a"]}')
    folder = Path("cifar-c")
    folder.mkdir()
    np.save(folder / "labels.npy", np.arange(7))
    np.save(folder / "fog.npy", np.zeros((10, 32, 32, 3)))
