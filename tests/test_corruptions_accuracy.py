"""Accuracy under corruptions: read from files as they are released, and refused where they are not."""

import math
import re
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from bullettrain.config.settings import ConfigError
from bullettrain.corruptions import AVERAGED, CORRUPTIONS
from bullettrain.data import DataError
from bullettrain.data.sets import stratified
from bullettrain.evaluation.accuracy import EvaluatedModel
from bullettrain.evaluation.corruptions import corruption_accuracy
from bullettrain.evaluation.results import unpack_counts
from conftest import assert_same, norm_net, snapshot

CPU = torch.device("cpu")
N = 20
LABELS = np.arange(N) % 4


class Reads(nn.Module):
    """Predicts the class that stands in an image's first pixel."""

    def __init__(self, classes=4):
        super().__init__()
        self.classes = classes
        self.sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        assert x.dtype == torch.float32
        assert x.shape[1:] == (3, 32, 32)
        assert not self.training
        said = (x[:, 2, 0, 1] * 255).round().long()  # blue of the second pixel: layout counts
        return nn.functional.one_hot(said, self.classes).float()


def write(folder, names, wrong=lambda name, severity: 0):
    """Files in which the network that Reads is wrong in so many images of each severity."""
    folder.mkdir(exist_ok=True)
    np.save(folder / "labels.npy", np.tile(LABELS.astype(np.uint8), 5))
    for name in names:
        images = np.full((5, N, 32, 32, 3), 77, np.uint8)
        for severity in range(1, 6):
            said = LABELS.copy()
            said[: wrong(name, severity)] = (said[: wrong(name, severity)] + 1) % 4
            images[severity - 1, :, 0, 1, 2] = said
        np.save(folder / f"{name}.npy", images.reshape(5 * N, 32, 32, 3))
    return folder


def test_accuracy_by_corruption_and_severity(tmp_path):
    folder = write(tmp_path, CORRUPTIONS, lambda name, severity: severity + list(CORRUPTIONS).index(name) % 3)
    ticks, model = [], Reads()
    model.train()
    result = corruption_accuracy(model, folder, device=CPU, batch_size=8, tick=ticks.append, classes=4)
    assert model.training
    assert list(result.accuracy) == list(CORRUPTIONS)
    for i, name in enumerate(CORRUPTIONS):
        assert result.accuracy[name] == [(N - severity - i % 3) / N for severity in range(1, 6)]
    assert result.missing == []
    assert result.examples == N
    assert result.over == 15
    assert result.mean == pytest.approx(np.mean([result.accuracy[name] for name in AVERAGED]), abs=1e-12)
    places = {name: i for i, name in enumerate(CORRUPTIONS)}
    wrong = [severity + places[name] % 3 for name in AVERAGED for severity in range(1, 6)]
    assert unpack_counts(result.kept, N).tolist() == [
        sum(row >= count for count in wrong) for row in range(N)
    ]  # the first are wrong
    again = corruption_accuracy(Reads(), folder, device=CPU, classes=4)
    assert again == result
    images = np.load(folder / "fog.npy")
    images[N // 2] ^= 1
    np.save(folder / "fog.npy", images)
    assert corruption_accuracy(Reads(100), folder, device=CPU, classes=100).fingerprint != result.fingerprint
    assert sum(ticks) == 19 * 5 * N
    assert [count for count in ticks if count] == model.sizes[1:]  # after a look whether the network takes the images
    assert max(ticks) == 8


def test_some_images_of_each_severity(tmp_path):
    """Every class alike; the first three of the twenty are wrong."""
    folder = write(tmp_path, AVERAGED[:2], lambda name, severity: 3)
    ticks, model = [], Reads()
    result = corruption_accuracy(model, folder, device=CPU, batch_size=3, size=8, tick=ticks.append, classes=4)
    rows = stratified(torch.from_numpy(LABELS), 8, seed=0)[1]
    assert result.examples == 8
    assert sum(ticks) == 2 * 5 * 8
    assert set(result.accuracy[AVERAGED[0]]) == {(rows >= 3).sum().item() / 8}
    assert corruption_accuracy(model, folder, device=CPU, size=99, classes=4).examples == N


def test_the_mean_is_over_what_is_there(tmp_path):
    there = [name for name in CORRUPTIONS if name not in ("frost", "saturate")]
    folder = write(tmp_path, there, lambda name, severity: 10 if CORRUPTIONS[name].extra else 0)
    result = corruption_accuracy(Reads(), folder, device=CPU, classes=4)
    assert result.missing == ["frost"]
    assert result.over == 14
    assert result.mean == 1.0
    assert "saturate" not in result.accuracy
    assert result.accuracy["spatter"] == [0.5] * 5


def test_weights_modes_and_statistics_stay(tmp_path):
    folder = write(tmp_path, ["fog"])
    model = norm_net(classes=4)
    model[1].eval()
    model[0].weight.requires_grad_(False)
    before = snapshot(model)
    assert corruption_accuracy(model, folder, device=CPU, classes=4).examples == N
    assert_same(before, snapshot(model))

    def stop(images):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        corruption_accuracy(model, folder, device=CPU, tick=stop, classes=4)
    assert_same(before, snapshot(model))


def test_one_file_at_a_time_is_mapped_and_none_is_read_whole(tmp_path, monkeypatch):
    folder = write(tmp_path, ["fog", "snow", "frost"])
    opened, mapped_at_once = [], []
    original = np.lib.format.open_memmap

    def open_memmap(*arguments, **options):
        array = original(*arguments, **options)
        assert isinstance(array, np.memmap)
        assert array.mode == "r"
        opened.append(weakref.ref(array))
        return array

    monkeypatch.setattr(np.lib.format, "open_memmap", open_memmap)

    def tick(images):
        mapped_at_once.append(sum(file() is not None for file in opened))

    corruption_accuracy(Reads(), folder, device=CPU, tick=tick, classes=4)
    assert max(mapped_at_once) <= 2  # the labels, and one file


def refused(folder, match, **options):
    with pytest.raises(DataError, match=match) as found:
        corruption_accuracy(Reads(), folder, device=CPU, **{"classes": 4, **options})
    message = str(found.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def test_wrong_files_are_named(tmp_path):
    folder = tmp_path / "c"
    refused(folder, "is not a folder")
    folder.mkdir()
    refused(folder, r"has none of the files gaussian_noise\.npy")
    write(folder, ["fog", "snow"])
    (folder / "labels.npy").unlink()
    refused(folder, r"labels\.npy is missing")
    write(folder, ["fog", "snow"])
    fine = np.load(folder / "snow.npy")
    for array, match in (
        (fine[:50], r"snow\.npy has 50 images, but there are 100 labels"),
        (fine.astype(np.float32), r"snow\.npy holds float32"),
        (fine.transpose(0, 3, 1, 2), r"snow\.npy holds uint8 of shape \(100, 3, 32, 32\)"),
        (fine[..., 0], r"snow\.npy holds uint8 of shape \(100, 32, 32\)"),
        (np.array([{}], dtype=object), r"snow\.npy is truncated or not an \.npy file"),
    ):
        np.save(folder / "snow.npy", array, allow_pickle=True)
        refused(folder, match)
    np.save(folder / "snow.npy", fine)
    whole = (folder / "snow.npy").read_bytes()
    for data in (whole[:-7], whole[:40], b"", b"text"):
        (folder / "snow.npy").write_bytes(data)
        refused(folder, r"snow\.npy is truncated or not an \.npy file")


def test_wrong_labels_are_named(tmp_path):
    folder = write(tmp_path, ["fog"])
    refused(folder, r"labels\.npy has the label 3: number the classes from 0 to 2", classes=3)
    for labels, match in (
        (np.arange(100.0), "holds float64"),
        (np.zeros((100, 1), int), r"shape \(100, 1\)"),
        (np.zeros(0, int), "no labels"),
        (np.full(100, -1), "the label -1"),
        (np.arange(100) % 3, "the same labels 5 times over"),
        (np.zeros(99, int), "the same labels 5 times over"),
    ):
        np.save(folder / "labels.npy", labels)
        refused(folder, match)


def test_a_network_without_logits_is_refused(tmp_path):
    folder = write(tmp_path, ["fog"])
    with pytest.raises(ValueError, match="logits"):
        corruption_accuracy(nn.Flatten(2), folder, device=CPU, classes=4)


# --- mean corruption error ---


def test_mean_corruption_error(tmp_path):
    wrong = {"fog": 2, "snow": 10, "spatter": 20}
    folder = write(tmp_path, wrong, lambda name, severity: wrong[name] * (severity if name == "fog" else 1))
    baseline = {"fog": [0.8, 0.6, 0.4, 0.2, 0.0], "snow": [0.75] * 5}
    # Fog: 1.5 errors of the baseline's 3; snow: 2.5 of 1.25; spatter is extra and does not count.
    result = corruption_accuracy(Reads(), folder, device=CPU, classes=4, baseline=baseline)
    assert result.mce == pytest.approx((0.5 + 2.0) / 2)
    again = corruption_accuracy(Reads(), folder, device=CPU, classes=4, baseline=result.accuracy)
    assert again.mce == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("baseline", "match"),
    [
        ({}, r"the baseline has \[\] for fog: give 5 accuracies"),
        ({"fog": [0.5] * 4}, "for fog: give 5 accuracies"),
        ({"fog": [50.0] * 5}, "for fog: give 5 accuracies"),
        ({"fog": [math.nan] * 5}, "for fog: give 5 accuracies"),
        ({"fog": [1.0] * 5}, "for fog: give 5 accuracies in .*, not all of them 1"),
    ],
)
def test_a_baseline_that_does_not_fit_is_named(tmp_path, baseline, match):
    """Before anything is evaluated."""
    with pytest.raises(DataError, match=match):
        corruption_accuracy(None, write(tmp_path, ["fog"]), device=CPU, classes=4, baseline=baseline)


def test_a_network_for_other_images_is_told_so(tmp_path):
    folder = write(tmp_path, ["fog"])
    with pytest.raises(ConfigError, match=r"the network does not take the images of .*, 3×32×32: .*channels"):
        corruption_accuracy(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), folder, device=CPU, classes=4)


def test_float32_judges_in_whatever_precision_a_network_attacks(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 4, bias=False)).requires_grad_(False)
    net[1].weight.copy_(torch.tensor([1.0, 1.001, 0.0, 0.0])[:, None].expand(4, 3072))  # two of them equal in bf16
    np.save(tmp_path / "labels.npy", np.ones(5 * N, np.uint8))
    np.save(tmp_path / "fog.npy", np.full((5 * N, 32, 32, 3), 200, np.uint8))
    evaluated = EvaluatedModel(net, dtype=torch.bfloat16)
    assert (evaluated(torch.ones(1, 3, 32, 32)).argmax(1) == 0).all()
    assert corruption_accuracy(evaluated, tmp_path, device=CPU, classes=4).accuracy["fog"] == [1.0] * 5


@pytest.mark.parametrize(("name", "dataset"), [("CIFAR-10-C", "cifar10"), ("CIFAR-100-C", "cifar100")])
def test_the_command_that_makes_missing_files_can_be_typed_as_it_stands(tmp_path, name, dataset):
    folder = tmp_path / name
    folder.mkdir()
    command = f"bullettrain data corrupt --dataset {dataset} --out {folder}"
    with pytest.raises(DataError, match=re.escape(f"`{command}`")):
        corruption_accuracy(Reads(), folder, device=CPU, classes=4)
