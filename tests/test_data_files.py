"""Folders of images and .npz files."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bullettrain.data import DataError, load
from bullettrain.errors import UserError
from test_data_readers import complains

rng = np.random.default_rng(1)


def pixels(*shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape, dtype=np.uint8)


def write_folder(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), n: int = 5) -> dict[str, np.ndarray]:
    images = {}
    for name in classes:
        (folder / name).mkdir(parents=True)
        images[name] = pixels(n, 6, 7, 3)
        for i, image in enumerate(images[name]):
            Image.fromarray(image).save(folder / name / f"{i}.png")
    return images


# --- folders ---


def test_folder_with_train_and_test(tmp_path):
    train = write_folder(tmp_path / "train", ("bird", "cat", "dog"))
    test = write_folder(tmp_path / "test", ("dog",), 2)
    (tmp_path / "train" / "cat" / ".hidden").write_text("passed over")
    data = load(f"folder:{tmp_path}", split="train")
    assert data.classes == ("bird", "cat", "dog")
    assert data.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert np.array_equal(data.images.numpy(), np.concatenate(list(train.values())).transpose(0, 3, 1, 2))
    data = load(f"folder:{tmp_path}", split="test")
    assert data.classes == ("bird", "cat", "dog")
    assert data.labels.tolist() == [2, 2]
    assert np.array_equal(data.images.numpy(), test["dog"].transpose(0, 3, 1, 2))
    (tmp_path / "test" / "fish").mkdir()
    complains("fish is a class that the training folder does not have", f"folder:{tmp_path}", tmp_path, "test")


def test_a_test_folder_may_be_called_val(tmp_path):
    write_folder(tmp_path / "train")
    complains("has a train but no test or val folder: add one, or give .*train to", f"folder:{tmp_path}", tmp_path)
    expected = write_folder(tmp_path / "val", n=2)
    assert len(load(f"folder:{tmp_path}", split="test")) == sum(map(len, expected.values())) == 4
    assert len(load(f"folder:{tmp_path}", split="train")) == 10


def test_a_class_may_be_called_train(tmp_path):
    write_folder(tmp_path, classes=("car", "train"))
    assert load(f"folder:{tmp_path}", split="test").classes == ("car", "train")


def test_folder_in_one_is_split_by_class(tmp_path):
    write_folder(tmp_path, n=10)
    train, test = (load(f"folder:{tmp_path}", split=split) for split in ("train", "test"))
    assert (len(train), len(test)) == (16, 4)
    assert test.labels.tolist() == [0, 0, 1, 1]
    rows = {tuple(image.flatten().tolist()) for image in (*train.images, *test.images)}
    assert len(rows) == 20


def test_grey_images_have_one_channel_and_join_colour(tmp_path):
    write_folder(tmp_path)
    grey = pixels(6, 7)
    Image.fromarray(grey).save(tmp_path / "dog" / "9.png")
    data = load(f"folder:{tmp_path}", split="train")
    assert data.images.shape[1] == 3
    Image.fromarray(grey).save(tmp_path / "cat" / "0.png")
    complains("1.png is in colour but .*0.png is grey", f"folder:{tmp_path}", tmp_path)
    for file in tmp_path.glob("*/*.png"):
        Image.fromarray(grey).save(file)
    data = load(f"folder:{tmp_path}", split="test")
    assert data.images.shape[1:] == (1, 6, 7)
    assert np.array_equal(data.images[0, 0].numpy(), grey)


def test_the_first_training_image_decides_for_the_test_images(tmp_path):
    write_folder(tmp_path / "train", n=2)
    for name in ("cat", "dog"):
        (tmp_path / "test" / name).mkdir(parents=True)
        Image.fromarray(pixels(6, 7)).save(tmp_path / "test" / name / "0.png")
    train, test = (load(f"folder:{tmp_path}", split=split) for split in ("train", "test"))
    assert train.images.shape[1:] == test.images.shape[1:] == (3, 6, 7)
    Image.fromarray(pixels(9, 7)).save(tmp_path / "test" / "cat" / "0.png")
    complains("test/cat/0.png is 9x7 but .*train/cat/0.png is 6x7", f"folder:{tmp_path}", tmp_path, "test")


def test_images_of_other_sizes_need_an_image_size(tmp_path):
    images = write_folder(tmp_path / "train", n=2)
    write_folder(tmp_path / "test", n=2)
    other = pixels(9, 4, 3)
    Image.fromarray(other).save(tmp_path / "train" / "dog" / "1.png")
    complains(r"1.png is 9x4 but .*0.png is 6x7: give an image size", f"folder:{tmp_path}", tmp_path)
    data = load(f"folder:{tmp_path}", split="train", image_size=(6, 7))
    assert data.images.shape[1:] == (3, 6, 7)
    assert np.array_equal(data.images[0].numpy(), images["cat"][0].transpose(2, 0, 1))
    resized = Image.fromarray(other).resize((7, 6), Image.Resampling.BILINEAR)
    assert np.array_equal(data.images[3].numpy(), np.asarray(resized).transpose(2, 0, 1))
    assert load(f"folder:{tmp_path}", split="train", image_size=8).images.shape[1:] == (3, 8, 8)
    with pytest.raises(DataError, match="at least 1 and at most 8192"):
        load(f"folder:{tmp_path}", split="train", image_size=0)


def test_a_pipe_among_images_is_not_waited_for(tmp_path):
    write_folder(tmp_path)
    os.mkfifo(tmp_path / "cat" / "9.png")
    complains("9.png is a pipe", f"folder:{tmp_path}", tmp_path)


def test_a_folder_of_nobody():
    with pytest.raises(UserError, match="there is no user called 'nosuch' here"):
        load("folder:~nosuch/images", split="train")


def test_wrong_folders_are_named(tmp_path):
    name = f"folder:{tmp_path / 'x'}"
    complains("x is missing: name yours with --data folder:PATH, a folder with one", name, tmp_path)
    (tmp_path / "x").mkdir()
    complains("x has no class folders", name, tmp_path)
    (tmp_path / "x" / "dog").mkdir()
    complains("x has one class folder, dog: at least two are needed", name, tmp_path)
    (tmp_path / "x" / "dog").rmdir()
    write_folder(tmp_path / "x")
    victim = tmp_path / "x" / "dog" / "3.png"
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-60])
    assert str(victim) in complains("image file is truncated", name, tmp_path)
    victim.write_bytes(b"not an image")
    assert str(victim) in complains("is truncated or not an image that Pillow can read", name, tmp_path)
    Image.fromarray(np.zeros((6, 7), np.uint16)).save(victim)
    complains("more than 8 bits per pixel", name, tmp_path)
    victim.unlink()
    victim.mkdir()
    complains("is a folder, not an image", name, tmp_path)
    victim.rmdir()
    (tmp_path / "x" / "empty").mkdir()
    complains("empty has no images", name, tmp_path)


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    write_folder(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r'needs Pillow: .* pip install "\.\[app\]"'):
        load(f"folder:{tmp_path}", split="train")


# --- npz ---


def test_npz_layouts_and_types_are_one_set(tmp_path):
    x, y = pixels(10, 5, 6, 3), np.arange(10) % 3
    forms = {
        "last": x,
        "first": x.transpose(0, 3, 1, 2),
        "float32": (x / 255).astype(np.float32),
        "float64": x / 255,
        "float16": (x / 255).astype(np.float16),
    }
    for name, form in forms.items():
        np.savez_compressed(tmp_path / f"{name}.npz", x=form, y=y.astype(np.int16))
        train, test = (load(f"npz:{tmp_path / name}.npz", split=split) for split in ("train", "test"))
        assert (len(train), len(test)) == (8, 2)
        assert train.classes == ("0", "1", "2")
        rows = {
            (int(label), *image.flatten().tolist()) for image, label in zip(train.images, train.labels, strict=True)
        }
        rows |= {(int(label), *image.flatten().tolist()) for image, label in zip(test.images, test.labels, strict=True)}
        assert rows == {
            (int(c), *image.flatten().tolist()) for image, c in zip(x.transpose(0, 3, 1, 2), y, strict=True)
        }
    np.savez(tmp_path / "grey.npz", x=x[..., 0], y=y)
    assert load(f"npz:{tmp_path}/grey.npz", split="train").images.shape == (8, 1, 5, 6)


def test_npz_folder_has_its_own_test_set(tmp_path):
    x = pixels(6, 1, 4, 4)
    np.savez(tmp_path / "train.npz", x=x[:4], y=[0, 1, 2, 3])
    np.savez(tmp_path / "test.npz", x=x[4:], y=[3, 4])
    train, test = (load(f"npz:{tmp_path}", split=split) for split in ("train", "test"))
    assert train.classes == test.classes == ("0", "1", "2", "3", "4")
    assert np.array_equal(train.images.numpy(), x[:4])
    assert test.labels.tolist() == [3, 4]
    np.savez(tmp_path / "test.npz", x=x[4:, :, :3], y=[3, 4])
    complains(r"has training images of \(1, 4, 4\) but test images of \(1, 3, 4\)", f"npz:{tmp_path}", tmp_path)
    (tmp_path / "test.npz").unlink()
    complains("test.npz is missing", f"npz:{tmp_path}", tmp_path)


X, Y = pixels(4, 5, 5, 3), np.arange(4)


@pytest.mark.parametrize(
    ("match", "arrays"),
    [
        (r"no array 'y' \(it holds x, z\)", {"x": X, "z": Y}),
        ("no array 'x'", {"y": Y}),
        ("Object arrays cannot be loaded", {"x": X, "y": np.array([1, {}, 2, 3], dtype=object)}),
        ("3 labels for 4 images", {"x": X, "y": Y[:3]}),
        ("y of float64", {"x": X, "y": Y / 2}),
        (r"y of int64 and shape \(4, 1\)", {"x": X, "y": Y[:, None]}),
        ("the label -1", {"x": X, "y": Y - 1}),
        ("the label 103, but fewer images", {"x": X, "y": Y + 100}),
        ("x of int64", {"x": X.astype(int), "y": Y}),
        (r"x outside \[0, 1\] \(from 0 to 2", {"x": np.linspace(0, 2, 100).reshape(4, 5, 5), "y": Y}),
        (r"x outside \[0, 1\] \(from nan", {"x": np.full((4, 5, 5), np.nan), "y": Y}),
        ("no axis of 1 or 3 channels", {"x": pixels(4, 5, 5, 4), "y": Y}),
        ("could be channels first or last", {"x": pixels(4, 3, 5, 3), "y": Y}),
        ("no axis of 1 or 3 channels", {"x": pixels(4, 5), "y": Y}),
        ("images without pixels", {"x": pixels(4, 0, 5), "y": Y}),
        ("has no labels", {"x": X[:0], "y": Y[:0]}),
    ],
)
def test_wrong_npz_files_are_named(tmp_path, match, arrays):
    np.savez(tmp_path / "mine.npz", **arrays)
    assert "mine.npz" in complains(match, f"npz:{tmp_path}/mine.npz", tmp_path)


def test_truncated_and_foreign_npz_files_are_named(tmp_path):
    file = tmp_path / "mine.npz"
    complains("mine.npz is missing", f"npz:{file}", tmp_path)
    np.savez(file, x=X, y=Y)
    whole = file.read_bytes()
    np.save(tmp_path / "array.npy", X)
    damaged = whole.replace(X.tobytes()[100:110], b"0123456789")
    for data in (whole[:-40], whole[:100], b"", b"text", (tmp_path / "array.npy").read_bytes(), damaged):
        file.write_bytes(data)
        assert str(file) in complains("is truncated or not an .npz file", f"npz:{file}", tmp_path)
