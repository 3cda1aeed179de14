"""`--minutes`: the epochs that fit, by arithmetic; and images and threads that are looked at before training."""

import os

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from PIL import Image
from typer.testing import CliRunner

from bullettrain.checkpoint_paths import choose_weights
from bullettrain.cli.app import app
from bullettrain.config import ConfigError, recipe
from bullettrain.config.sections import ScheduleConfig
from bullettrain.data import DataError
from bullettrain.processes import Place
from bullettrain.run_folder import RunError, RunFolder
from bullettrain.training import minutes
from bullettrain.training import run as runs
from bullettrain.training.minutes import Timing, for_minutes
from bullettrain.training.optimizer import rate
from bullettrain.training.setup import load_data, threads_of
from short_runs import CPU, small


class Second(Place):
    """One of two processes; the first found time for 52 epochs."""

    def largest(self, number):
        return max(number, 52) if number > 1 else number


def test_processes_agree_on_the_epochs(monkeypatch):
    monkeypatch.setattr(minutes.time, "monotonic", lambda: 1060.0)
    monkeypatch.setattr(minutes, "measure", lambda *_: Timing(start=30.0, epoch=10.0, end=10.0))
    place = Second(CPU.device, rank=1, world=2)
    assert for_minutes(recipe("cifar10-trades"), 10, place, (), began=1000.0).training.epochs == 52


@pytest.mark.parametrize(
    ("settings", "needed"), [(("attack_group=4",), 240), (("attack_group=4", "accumulate=2"), 120)]
)
def test_too_few_images_for_a_timing_are_named(settings, needed):
    config = small("train_size=100", "training.batch_size=60", *settings)
    with pytest.raises(ConfigError, match=f"there are 40 training images for {needed} at once; give --batch-size"):
        minutes.measure(config, CPU, load_data(config, None))


@given(st.floats(0, 1), st.integers(1, 20), st.integers(1, 5))
def test_one_cycle_stays_below_its_highest_rate(warmup, steps, epochs):
    schedule = ScheduleConfig("one-cycle", warmup=warmup)
    rates = [rate(schedule, 0.1, step, steps, epochs) for step in range(steps * epochs)]
    assert min(rates) >= 0
    assert max(rates) <= 0.1 * (1 + 1e-12)


@pytest.mark.parametrize("seconds", [300.0, 600.0, 3600.0])
@pytest.mark.parametrize("epoch", [2.5, 9.0, 40.0])
def test_the_whole_run_ends_within_a_tenth(seconds, epoch):
    timing = Timing(start=35.0, epoch=epoch, end=20.0)
    epochs = timing.epochs(seconds)
    assert timing.total(epochs) == 35.0 + epochs * epoch + 20.0
    assert abs(timing.total(epochs) - seconds) <= max(epoch / 2, 0.1 * seconds)
    assert Timing(35.0, 2.5, 20.0).epochs(1.0) == 1


def test_epochs_and_milestones_are_chosen(monkeypatch):
    """Ten minutes, of which one is over when the timing has ended."""
    monkeypatch.setattr(minutes.time, "monotonic", lambda: 1060.0)
    monkeypatch.setattr(minutes, "measure", lambda *_: Timing(start=30.0, epoch=10.0, end=10.0))
    chosen = for_minutes(recipe("cifar10-trades"), 10, CPU, (), began=1000.0)
    assert (chosen.training.epochs, chosen.schedule.milestones) == (50, (49,))
    with pytest.raises(ConfigError, match=r"--minutes 1.5 is too short: an epoch and evaluation take 1.8 minutes$"):
        for_minutes(recipe("cifar10-trades"), 1.5, CPU, (), began=1000.0)


def test_a_few_steps_are_timed():
    config = small("data.train_size=200", "data.validation=50")
    timing = minutes.measure(config, CPU, load_data(config, None))
    assert timing.epoch > 0
    assert timing.end > minutes.REPORT_SECONDS


def test_the_command_trains_for_so_long(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(minutes, "measure", lambda *_: Timing(start=0.0, epoch=600.0, end=0.0))
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, "elsewhere")
    cuts = [word for cut in ("data.train_size=200", "data.test_size=50", "validation=0") for word in ("--set", cut)]
    done = CliRunner().invoke(app, ["train", *cuts, "--minutes", "30", "--out", "run", "--cache-dir", "code"])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[0] == "3 epochs, in 30 min 0 s: 10 min 0 s an epoch"
    assert RunFolder(tmp_path / "run").config().training.epochs == 3
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "code" / "inductor")
    for words in (["--epochs", "3"], ["--compare"], ["--resume"]):
        (tmp_path / "other").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=f"--minutes and {words[0]} do not go together; give one of them"):
            raise CliRunner().invoke(app, ["train", "--minutes", "1", "--out", "other", *words]).exception


def test_too_many_threads_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"training.threads is 1000, but this machine has \d+ cores; at most"):
        runs.train(small("threads=1000"), tmp_path / "run", CPU)


@pytest.mark.parametrize(
    ("settings", "device", "threads"),
    [
        (["threads=0"], "cpu", 1),
        (["threads=3"], "cpu", 3),
        (["threads=0"], "cuda", 0),
        (["threads=0", "network.name=preact-resnet-18"], "cpu", 0),
    ],
)
def test_the_smallest_network_is_trained_by_one_thread_on_a_cpu(settings, device, threads):
    assert threads_of(small(*settings), torch.device(device)) == threads


def test_images_that_differ_between_training_and_test_are_found_before_training(tmp_path):
    for split, size in (("train", 12), ("test", 16)):
        for index in range(4):
            folder = tmp_path / "images" / split / f"class-{index % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((size, size, 3), index, dtype=np.uint8)).save(folder / f"{index}.png")
    settings = (f"data.name=folder:{tmp_path}/images", "data.train_size=0", "data.test_size=0", "data.validation=0")
    with pytest.raises(DataError, match=r"test/class-0/0.png is 16x16 but .*train/class-0/0.png is 12x12"):
        runs.train(small(*settings), tmp_path / "run", CPU)
    assert not (tmp_path / "run").exists()


def test_yopo_resumed_after_its_last_step_reports_the_same_work(tmp_path):
    from bullettrain.config.methods import with_method

    config = with_method(small("epochs=1"), "yopo-2-5")
    whole = runs.train(config, tmp_path / "run", CPU)
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"end"' not in line))
    again = runs.train(config, tmp_path / "run", CPU, resume=True)
    assert again.end["plain_work"] == whole.end["plain_work"] > 12


def test_few_images_are_told_which_batch_size_to_give():
    config = small("data.train_size=140", "training.batch_size=128")
    with pytest.raises(ConfigError, match=r"there are \d+ training images for 128 at once; give --batch-size \d"):
        for_minutes(config, 1.0, CPU, load_data(config, None), began=0.0)


def test_a_finished_run_writes_weights_that_are_gone_or_damaged_again(tmp_path):
    runs.train(small("epochs=1"), tmp_path / "run", CPU)
    best = tmp_path / "run" / "best.safetensors"
    content = best.read_bytes()
    best.unlink()
    with pytest.raises(RunError, match=r"has no 'best' weights; it has last.*--resume' writes them again"):
        choose_weights(tmp_path / "run", None)
    for damaged in (None, b"\0" + content[1:]):
        if damaged is not None:
            best.write_bytes(damaged)
        runs.train(small("epochs=1"), tmp_path / "run", CPU, resume=True)
        assert best.read_bytes() == content
    assert choose_weights(tmp_path / "run", None) == "best"
