"""Checkpoints that are written while training goes on: whole, of the moment they were asked for, and never lost."""

import threading

import pytest
import torch

from bullettrain.run_folder import Checkpoint, CheckpointWriter, Metadata, RunError, RunFolder, Weights, read_weights
from bullettrain.training import run as runs
from bullettrain.training import trainer as trainer_module
from short_runs import CPU, died, interrupt_at_the_third_group, kinds, small, weights_of
from test_resuming import killing_self


def save(writer, weights, step=0):
    optimizer = {"state": {0: {"momentum": weights["w"]}}, "groups": [{"lr": weights["w"][0]}]}
    of = Weights(weights, Metadata(step))
    writer.save(Checkpoint({"last": of, "averaged": of}, {"step": step, "optimizer": optimizer}))


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_is_of_the_moment_it_was_asked_for(tmp_path, monkeypatch, background):
    begin, original = threading.Event(), RunFolder.save
    if not background:
        begin.set()
    monkeypatch.setattr(RunFolder, "save", lambda self, *parts: begin.wait(60) and original(self, *parts))
    weights = {"w": torch.ones(3)}
    with CheckpointWriter(RunFolder(tmp_path), background=background) as writer:
        save(writer, weights, step=1)
        assert RunFolder(tmp_path).has_checkpoint() != background  # in the background it has not begun
        weights["w"].mul_(7)
        begin.set()
        writer.wait()
        first, state = RunFolder(tmp_path).load()
        momentum = state["optimizer"]["state"][0]["momentum"]
        assert first["last"].tensors["w"].tolist() == momentum.tolist() == [1, 1, 1]
        assert float(state["optimizer"]["groups"][0]["lr"]) == 1
        save(writer, weights, step=2)  # the end waits for it
    kept, state = RunFolder(tmp_path).load()
    assert (kept["last"].tensors["w"].tolist(), kept["last"].about.step, state["step"]) == ([7, 7, 7], 2, 2)
    assert read_weights(tmp_path / "averaged.safetensors")[0]["w"].tolist() == [7, 7, 7]


def test_what_goes_wrong_is_not_lost(tmp_path, monkeypatch):
    def full(*_):
        raise RunError("the disk is full")

    monkeypatch.setattr(RunFolder, "save", full)

    def use(times, error=None):
        with CheckpointWriter(RunFolder(tmp_path), background=True) as writer:
            for _ in range(times):
                save(writer, {"w": torch.ones(1)})
                asked.append(times)
            if error is not None:
                raise error

    asked = []
    with pytest.raises(RunError, match="full"):
        use(1)
    with pytest.raises(RunError, match="full"):
        use(2)
    assert asked == [1, 2]  # the second was told of the first
    with pytest.raises(ZeroDivisionError):  # the first reason is the one that counts
        use(1, ZeroDivisionError())


@pytest.fixture
def background(monkeypatch):
    make = CheckpointWriter
    monkeypatch.setattr(trainer_module, "CheckpointWriter", lambda folder, background: make(folder, background=True))


def test_a_run_ends_bit_for_bit_as_if_it_had_waited(tmp_path, whole, background):
    assert runs.train(small(), tmp_path / "run", CPU).finished
    assert weights_of(tmp_path / "run") == weights_of(whole)


@pytest.mark.parametrize("place", [("file", 20), ("file", 40), ("step", 8)])
def test_a_killed_run_resumes_and_ends_bit_for_bit(tmp_path, whole, background, place):
    folder = tmp_path / "run"

    def doomed():
        killing_self(*place, folder)
        runs.train(small(), folder, CPU)

    assert died(doomed)
    assert runs.train(small(), folder, CPU, resume=True).finished
    assert weights_of(folder) == weights_of(whole)
    assert [r["loss"] for r in kinds(folder, "epoch")] == [r["loss"] for r in kinds(whole, "epoch")]


def test_a_stopped_run_has_written_where_it_stopped(tmp_path, monkeypatch, background):
    interrupt_at_the_third_group(monkeypatch)
    result = runs.train(small("attack_group=2"), tmp_path / "run", CPU)
    assert not result.finished
    weights, state = RunFolder(tmp_path / "run").load()
    assert weights["last"].about.step == state["position"]["step"] == 5
