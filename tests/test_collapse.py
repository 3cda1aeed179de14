"""Training that goes wrong: noticed, said, and never saved."""

import math

import pytest
import torch

import bullettrain as bt
from bullettrain.config import recipe
from bullettrain.data import ImageSet, load
from bullettrain.run_folder import RunFolder, read_weights
from bullettrain.training import run as runs
from bullettrain.training import state
from bullettrain.training.collapse import (
    CollapseError,
    WrongStreak,
    look_at_epoch,
    look_at_loss,
    look_at_robustness,
    look_at_test,
    low_probe,
)
from bullettrain.training.evaluator import probe_images
from bullettrain.training.metrics import Sums
from bullettrain.training.setup import load_data
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
    counts.update(examples=600, outlier=600, loss=1200.0)
    mined = bt.StepBudget(3, 1)
    streak = WrongStreak(bt.BulletTrain(bt.TRADES(eps=0.1), budget=mined))
    assert streak.look(counts) is None  # too few to tell
    assert "outlier" in streak.look(counts)
    counts.update(outlier=599)
    assert streak.look(counts) is None
    assert look_at_loss(counts) is None
    counts.update(loss=math.inf)
    assert "infinite" in look_at_loss(counts)
    plain = WrongStreak(bt.BulletTrain(bt.TRADES(eps=0.1), budget=bt.StepBudget.uniform(3)))
    counts.update(examples=2000, outlier=0, clean=0)
    assert "outlier" in plain.look(counts)  # a baseline has no outliers, but clean predictions
    # PGD-AT's baseline sees no clean predictions
    attacked = WrongStreak(bt.BulletTrain(bt.PGDAT(eps=0.1), budget=bt.StepBudget.uniform(3)))
    counts.update(examples=2000, robust_hits=0)
    assert [attacked.look(counts) for _ in range(9)] == [None] * 9  # as it is with a large eps at first
    assert "no attacked example" in attacked.look(counts)
    views = WrongStreak(bt.BulletTrain(bt.AugMix(jsd=False), budget=bt.StepBudget.uniform(1)))
    assert "outlier" in views.look(counts)
    assert "catastrophic" in look_at_epoch(0.7, 0.01, classes=10)
    fine = [(0.7, 0.3, 10), (0.2, 0.0, 10), (0.7, None, 10), (0.6, 0.0, 2)]  # the last: little above chance
    assert [look_at_epoch(robust, probe, classes=k) for robust, probe, k in fine] == [None] * 4


def test_a_streak_of_wrong_predictions_goes_on_after_a_resume(tmp_path):
    config = small("engine=eager")
    data = load_data(config, None)
    folder = RunFolder(tmp_path / "run")
    folder.create(config, {})
    trainer = Trainer(config, folder, CPU, data)
    trainer.streak.examples = 700.0
    saved = state.checkpoint(trainer)
    again = Trainer(config, folder, CPU, data)
    state.restore(again, saved)
    assert again.streak.examples == 700


def first_warning(epochs):
    """The index of the first epoch with a warning, from accuracies under the training attack and of the probe."""
    low = False
    for index, accuracies in enumerate(epochs):
        if look_at_epoch(*accuracies, classes=10, low_before=low):
            return index
        low = low_probe(*accuracies, classes=10)
    return None


def test_partial_catastrophic_overfitting_is_noticed():
    """TRADES on CIFAR-10 with steps 3/1/1, epochs 21 to 30; it ended with 10 % under PGD-20."""
    training = [0.689, 0.700, 0.719, 0.766, 0.826, 0.857, 0.878, 0.895, 0.912, 0.929]
    probe = [0.406, 0.398, 0.301, 0.258, 0.211, 0.254, 0.223, 0.234, 0.277, 0.254]
    assert first_warning(zip(training, probe, strict=True)) == 5


@pytest.mark.parametrize(
    ("training", "probe"),
    [
        # Epochs 2 to 9 with N_R = 0, whose unattacked examples count as robust; it ended with 40 % under PGD-20.
        (
            [0.488, 0.537, 0.570, 0.588, 0.598, 0.610, 0.620, 0.624],
            [0.145, 0.238, 0.250, 0.262, 0.238, 0.273, 0.230, 0.273],
        ),
        # Epochs 5 to 9 with steps 10/2/0 and random scores; it ended with 49 % under PGD-20.
        ([0.519, 0.539, 0.561, 0.573, 0.586], [0.270, 0.301, 0.199, 0.359, 0.324]),
        ([0.297, 0.403, 0.445, 0.479], [0.01, 0.02, 0.10, 0.277]),  # before the network has learned much
    ],
)
def test_a_probe_that_is_low_once_is_no_collapse(training, probe):
    assert first_warning(zip(training, probe, strict=True)) is None


def test_a_run_stops_when_the_probe_is_low_for_a_second_epoch_also_if_it_was_resumed(tmp_path):
    config = small("training.log_every=100")
    data, folder = load_data(config, None), RunFolder(tmp_path / "run")
    folder.create(config, {})

    def weak_attack():
        trainer = Trainer(config, folder, CPU, data)
        trainer.evaluator.probe = lambda *args: 0.25
        trainer.figures = lambda sums, figures=trainer.figures: {**figures(sums), "robust_accuracy": 0.9}
        return trainer

    for resumed in (False, True):
        trainer = weak_attack()
        if resumed:
            state.resume(trainer)
        with pytest.raises(CollapseError, match=r"catastrophic overfitting: 90 % .* all but 25 %"):
            trainer.run()
        assert [record["epoch"] for record in kinds(folder.path, "epoch")] == [1, 2]
        assert folder.load().state["position"]["low_probe"]


def test_the_probe_has_every_class():
    train = load("digits", split="train")
    by_class = train.subset(train.labels.argsort())
    assert torch.bincount(probe_images(by_class, 50).labels).min() >= 4


def test_a_network_that_always_gives_one_answer_is_said_to_be_at_chance(tmp_path):
    assert runs.train(small("lr=1e-30", "epochs=1"), tmp_path / "run", CPU).finished
    (warning,) = kinds(tmp_path / "run", "warning")
    assert warning["message"].startswith("no better than chance: the best weights are right on ")


@pytest.mark.parametrize(("right", "warned"), [(3, True), (7, True), (8, False), (10, False)])
def test_chance_is_the_share_of_the_largest_class_with_the_noise_of_few_images(right, warned):
    labels = torch.tensor([0] * 3 + [1] * 3 + [2] * 4)
    images = ImageSet(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), labels, ("a", "b", "c"))
    message = look_at_test("last", right / 10, images)
    assert (message is not None) == warned
    assert message is None or "always answering 'c' on 40.0 %" in message


@pytest.mark.parametrize(
    ("losses", "advice"),
    [
        ((), "; train longer, or lower --lr, or add images"),
        ((1.1, 0.5), "; train longer, or lower --lr, or add images"),
        ((1.1,), "; the training loss has hardly fallen: train longer, or try another --lr, or add images"),
        ((1.1, 1.05), "; the training loss has hardly fallen: train longer, or try another --lr, or add images"),
    ],
)
def test_a_network_at_chance_that_has_learned_nothing_is_not_told_to_learn_more_slowly(losses, advice):
    images = ImageSet(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]), ("a", "b"))
    assert look_at_test("last", 0.5, images, losses).endswith(advice)


def test_an_accuracy_near_zero_under_attack_is_said():
    assert look_at_robustness("last", 0.6, "pgd20", 0.051) is None
    message = look_at_robustness("last", 0.625, "pgd20", 0.0)
    assert message.startswith("not robust: the last weights are right on 62.5 % of the clean test images, but on 0.0 %")
    assert "under PGD-20; train longer, against more steps (method.boundary), or" in message


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (("boundary=1", "robust=1", "outlier=1"), True),
        (("boundary=0", "robust=0", "outlier=0"), False),
        (("clean_warmup=1",), False),
    ],
)
def test_a_run_against_attacks_says_that_it_ended_without_robustness(tmp_path, settings, warned):
    weak = ("eps=0.3", "method.step_size=0.001", "probe=0", "lr=5e-3", "epochs=12", "data.train_size=0", *settings)
    assert runs.train(small(*weak), tmp_path / "run", CPU).accuracy["best"]["clean"] > 0.5
    messages = [record["message"] for record in kinds(tmp_path / "run", "warning")]
    assert [message.partition(":")[0] for message in messages] == ["not robust"] * warned


@pytest.mark.parametrize("settings", [("clean_warmup=1",), ("boundary=0", "robust=0")])
def test_a_method_without_attacks(settings):
    assert recipe("digits").method.attacks
    assert not recipe("digits").with_settings(settings).method.attacks
    assert not recipe("digits-augmix").method.attacks
