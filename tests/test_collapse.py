"""Training that goes wrong: noticed, said, and never saved."""

import math

import pytest
import torch

import bullettrain as bt
from bullettrain.config import recipe
from bullettrain.data import load
from bullettrain.run_folder import RunFolder, read_weights
from bullettrain.training import run as runs
from bullettrain.training.collapse import CollapseError, WrongStreak, look_at_epoch, look_at_loss
from bullettrain.training.evaluator import probe_images
from bullettrain.training.metrics import Sums
from bullettrain.training.trainer import Trainer
from short_runs import CPU, kinds, small


@pytest.fixture
def nan_from_the_eighth_step(monkeypatch):
    original, calls = bt.TRADES.loss, [0]

    def loss(self, *args):
        calls[0] += 1
        return original(self, *args) * (float("nan") if calls[0] > 8 else 1.0)  # the warm-up is the first

    monkeypatch.setattr(bt.TRADES, "loss", loss)


@pytest.mark.usefixtures("nan_from_the_eighth_step")
def test_a_loss_of_nan_stops_the_run_and_keeps_the_last_good_state(tmp_path, monkeypatch):
    with pytest.raises(CollapseError, match="NaN"):
        runs.train(small(), tmp_path / "run", CPU)
    monkeypatch.undo()
    tensors, about = read_weights(tmp_path / "run" / "last.safetensors")
    assert about.epoch == 1
    assert all(torch.isfinite(t).all() for t in tensors.values())
    assert kinds(tmp_path / "run", "warning")[0]["message"].startswith("the ")
    assert kinds(tmp_path / "run", "end")[0]["reason"].startswith("collapsed")
    assert runs.train(small(), tmp_path / "run", CPU, resume=True).finished  # and it can go on from there


def test_nan_weights_are_noticed(tmp_path):
    with pytest.raises(CollapseError, match=r"NaN|infinite"):
        runs.train(small("lr=1e30", "optimizer.name=sgd", "epochs=40", "log_every=1"), tmp_path / "run", CPU)


@pytest.mark.usefixtures("nan_from_the_eighth_step")
def test_what_has_collapsed_is_not_saved(tmp_path):
    with pytest.raises(CollapseError, match="NaN"):  # though a checkpoint is due after every step
        runs.train(small("save_minutes=0", "log_every=50"), tmp_path / "run", CPU)
    tensors, about = read_weights(tmp_path / "run" / "last.safetensors")
    assert all(torch.isfinite(t).all() for t in tensors.values())
    assert about.step == 7
    assert kinds(tmp_path / "run", "end")[0]["seconds"] > 0


@pytest.mark.usefixtures("nan_from_the_eighth_step")
def test_what_has_collapsed_is_not_shown(tmp_path):
    with pytest.raises(CollapseError, match="NaN"):  # noticed at the end of the epoch, after the batch that is shown
        runs.train(small("log_every=50"), tmp_path / "run", CPU)
    assert [record["epoch"] for record in kinds(tmp_path / "run", "batch")] == [1]


def test_training_against_an_attack_that_is_too_weak_is_noticed(tmp_path):
    weak = ("method.boundary=1", "method.robust=1", "method.outlier=1", "method.step_size=0.001", "eps=0.3")
    settings = ("objective=trades", "epochs=40", "data.validation=0", "lr=5e-3", *weak)
    with pytest.raises(CollapseError, match="catastrophic overfitting"):
        runs.train(recipe("digits").with_settings(settings), tmp_path / "run", CPU)
    end = kinds(tmp_path / "run", "end")[0]
    assert 0 < end["epochs"] < 40
    assert read_weights(tmp_path / "run" / "last.safetensors")[1].epoch == end["epochs"]  # before the collapse


def test_training_against_no_attack_is_not_blamed_for_it(tmp_path):
    none = ("method.boundary=0", "method.robust=0", "method.outlier=0", "eps=0.3")
    settings = ("objective=trades", "epochs=12", "data.validation=0", "lr=5e-3", *none)
    runs.train(recipe("digits").with_settings(settings), tmp_path / "run", CPU)
    last = kinds(tmp_path / "run", "epoch")[-1]
    assert look_at_epoch(last["robust_accuracy"], last["probe_robust"], classes=10)  # it would be
    assert not kinds(tmp_path / "run", "warning")


def test_keep_going_only_warns(tmp_path):
    config = small("training.log_every=100")
    train, test = (load("digits", split=split) for split in ("train", "test"))
    data = train, test.subset(torch.arange(0)), test
    folder = RunFolder(tmp_path / "run")
    trainer = Trainer(config, folder, CPU, data, keep_going=True)
    folder.create(config, {})
    trainer.alarm("this is wrong")
    trainer.alarm("this is wrong")
    assert [record["message"] for record in kinds(tmp_path / "run", "warning")] == ["this is wrong"]
    with pytest.raises(CollapseError, match="that is worse"):
        Trainer(config, folder, CPU, data).alarm("that is worse")


def test_what_counts_as_collapse():
    counts = Sums()
    counts.values.update(examples=600, outlier=600, loss=1200.0)
    mined = bt.StepBudget(3, 1)
    streak = WrongStreak(bt.BulletTrain(bt.TRADES(eps=0.1), budget=mined))
    assert streak.look(counts) is None  # too few to tell
    assert "outlier" in streak.look(counts)
    counts.values.update(outlier=599)
    assert streak.look(counts) is None
    assert look_at_loss(counts) is None
    counts.values.update(loss=math.inf)
    assert "infinite" in look_at_loss(counts)
    plain = WrongStreak(bt.BulletTrain(bt.TRADES(eps=0.1), budget=bt.StepBudget.uniform(3)))
    counts.values.update(examples=2000, outlier=0, clean=0)
    assert "outlier" in plain.look(counts)  # a baseline has no outliers, but clean predictions
    # PGD-AT's baseline sees no clean predictions
    attacked = WrongStreak(bt.BulletTrain(bt.PGDAT(eps=0.1), budget=bt.StepBudget.uniform(3)))
    counts.values.update(examples=2000, robust_hits=0)
    assert [attacked.look(counts) for _ in range(9)] == [None] * 9  # as it is with a large eps at first
    assert "no attacked example" in attacked.look(counts)
    views = WrongStreak(bt.BulletTrain(bt.AugMix(jsd=False), budget=bt.StepBudget.uniform(1)))
    assert "outlier" in views.look(counts)
    assert "catastrophic" in look_at_epoch(0.7, 0.01, classes=10)
    fine = [(0.7, 0.3, 10), (0.2, 0.0, 10), (0.7, None, 10), (0.6, 0.0, 2)]  # the last: little above chance
    assert [look_at_epoch(robust, probe, classes=k) for robust, probe, k in fine] == [None] * 4


def test_the_probe_has_every_class():
    train = load("digits", split="train")
    by_class = train.subset(train.labels.argsort())
    assert torch.bincount(probe_images(by_class, 50).labels).min() >= 4
