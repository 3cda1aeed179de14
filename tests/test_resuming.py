"""Runs that are killed, stopped or damaged: nothing is lost, and a folder that holds something else is left alone."""

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import bullettrain as bt
from bullettrain import BulletTrain
from bullettrain.cli.app import app
from bullettrain.config import recipe
from bullettrain.reporting import write_report
from bullettrain.run_folder import RunError, RunFolder, environment, read_weights
from bullettrain.training import run as runs
from bullettrain.training import state
from bullettrain.training.optimizer import load_optimizer, make_optimizer
from bullettrain.training.setup import load_data
from short_runs import CPU, died, interrupt_at_the_third_group, kinds, small, weights_of


def killing_self(place, at, folder=None):
    """SIGKILL this process at the at-th training step, or at the at-th file operation in a folder, before it."""
    calls = itertools.count(1)

    def count():
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function):
        return lambda *args, **kwargs: (count(), function(*args, **kwargs))[1]

    if place == "step":
        bt.BulletTrain.updates = counted(bt.BulletTrain.updates)
        return
    os.fsync = counted(os.fsync)

    def audit(event, args):
        writes = event in ("os.rename", "os.remove", "os.truncate", "os.mkdir") or (
            event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if writes and str(args[0]).startswith(str(folder)):
            count()

    sys.addaudithook(audit)


def killed(folder, place, at, config=None):
    """Train in a process of its own that is killed at a point; whether it was killed."""

    def doomed():
        killing_self(place, at, folder)
        runs.train(config or small(), folder, CPU, resume=True)

    return died(doomed)


@pytest.fixture
def unfinished(tmp_path):
    folder = tmp_path / "run"
    assert killed(folder, "step", 10)
    return folder


# -------------------------------------------------------------------------------------- nothing is lost

TINY = ("epochs=2", "train_size=150", "test_size=40", "validation=30", "probe=0", "evaluation.steps=2", "boundary=2")
"""A quarter of a second."""


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_a_run_killed_at_any_file_operation_resumes_and_ends_bit_for_bit(tmp_path, first):
    """Before each open for writing, rename, removal, truncation, fsync and new folder; a quarter of them a test."""
    config, whole = small(*TINY), tmp_path / "whole"
    assert runs.train(config, whole, CPU).finished
    for at in itertools.count(first, 4):
        folder = tmp_path / str(at)
        if not killed(folder, "file", at, config):
            break
        assert runs.train(config, folder, CPU, resume=True).finished
        assert weights_of(folder) == weights_of(whole), at
        for kind, key in (("step", "step"), ("epoch", "loss"), ("evaluation", "accuracy"), ("end", "work")):
            assert [r[key] for r in kinds(folder, kind)] == [r[key] for r in kinds(whole, kind)], at
        assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}, at
    assert at > 50


@pytest.mark.parametrize("points", [(40, 30, 20), (30, 9), (60, 2), (70, 1)])
def test_a_run_killed_again_and_again_ends_bit_for_bit(tmp_path, whole, points):
    folder = tmp_path / "run"
    for at in points:
        killed(folder, "file", at)
    assert runs.train(small(), folder, CPU, resume=True).finished
    assert weights_of(folder) == weights_of(whole)


def test_saving_within_an_epoch_changes_nothing(tmp_path, whole):
    config = small("save_minutes=0")
    assert killed(tmp_path / "run", "step", 9, config)
    assert RunFolder(tmp_path / "run").load().state["position"]["index"] > 0
    runs.train(config, tmp_path / "run", CPU, resume=True)
    assert weights_of(tmp_path / "run") == weights_of(whole)


@pytest.mark.parametrize(
    "settings",
    [
        ("attack_group=3",),
        ("attack_group=2", "objective=mart"),
        ("attack_group=2", "data.views=true"),
        ("attack_group=2", "selection=last"),
    ],
)
def test_groups_train_and_resume_bit_for_bit(tmp_path, monkeypatch, settings):
    config = small(*settings)
    assert runs.train(config, tmp_path / "whole", CPU).finished
    interrupt_at_the_third_group(monkeypatch)
    assert runs.train(config, tmp_path / "cut", CPU).reason.startswith("stopped")
    monkeypatch.undo()
    assert runs.train(config, tmp_path / "cut", CPU, resume=True).finished
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")


def test_a_run_whose_attack_begins_later_resumes_bit_for_bit(tmp_path, monkeypatch):
    config = small("clean_warmup=0.4", "eps_warmup=0.3")
    assert runs.train(config, tmp_path / "whole", CPU).finished
    calls, original = [0], BulletTrain.updates

    def step(*args, **kwargs):
        calls[0] += 1
        if calls[0] == 4:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    monkeypatch.setattr(BulletTrain, "updates", step)
    assert runs.train(config, tmp_path / "cut", CPU).reason.startswith("stopped")
    monkeypatch.undo()
    assert runs.train(config, tmp_path / "cut", CPU, resume=True).finished
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_an_optimiser_goes_on_from_another_devices_state(name):
    """A state saved where steps were captured: counts and rates in tensors, flags of its own."""
    net = torch.nn.Linear(3, 2)
    config = recipe("digits").with_settings([f"optimizer.name={name}"]).optimizer
    optimizer, again = make_optimizer(net, config), make_optimizer(net, config)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group.update(lr=torch.tensor(0.01), fused=name == "sgd", **({} if name == "sgd" else {"capturable": True}))
    load_optimizer(again, state)
    again.step()
    optimizer.step()
    assert all(isinstance(group["lr"], float) and not group.get("capturable") for group in again.param_groups)
    for a, b in zip(again.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)


def test_the_checkpoint_holds_everything_once_and_no_code(whole):
    content = torch.load(whole / "checkpoint.pt", weights_only=True)
    assert set(content["weights"]) == {"last", "best", "averaged"}
    tensors = {
        id(tensor.untyped_storage()) for part in content["weights"].values() for tensor in part["tensors"].values()
    }
    assert len(tensors) == sum(len(part["tensors"]) for part in content["weights"].values())
    assert {"optimizer", "engine", "rng", "position"} <= set(content["state"])
    weights = sum((whole / f"{name}.safetensors").stat().st_size for name in content["weights"])
    assert (whole / "checkpoint.pt").stat().st_size < 2 * weights  # Adam has two moments more


def test_a_run_moves_to_another_machine_with_three_files(tmp_path, unfinished, whole, monkeypatch):
    """The rest of the folder is written from them, and the log says where it went on."""
    (tmp_path / "moved").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "checkpoint.pt"):
        (tmp_path / "moved" / name).write_bytes((unfinished / name).read_bytes())
    here = environment(CPU.device)
    monkeypatch.setattr(state, "environment", lambda device: {**here, "machine": "another", "device": "its CPU"})
    assert runs.train(small(), tmp_path / "moved", CPU, resume=True).finished
    assert weights_of(tmp_path / "moved") == weights_of(whole)
    (moved,) = kinds(tmp_path / "moved", "machine")
    assert (moved["machine"], moved["device"], moved["step"]) == ("another", "its CPU", 5)
    assert kinds(whole, "machine") == []
    (tmp_path / "moved" / "last.safetensors").unlink()
    assert runs.train(small(), tmp_path / "moved", CPU, resume=True).finished  # and it is written again
    assert weights_of(tmp_path / "moved") == weights_of(whole)


def test_a_machine_without_a_network_card_has_one_name(monkeypatch):
    def name(address: int) -> str:
        monkeypatch.setattr("uuid.getnode", lambda: address)
        return environment(CPU.device)["machine"]

    random = 1 << 40  # the bit of addresses that Python makes up, anew in each process
    assert name(random | 5) == name(random | 9)
    assert name(5) != name(9)


def test_a_log_that_was_left_behind_is_missed(unfinished):
    (unfinished / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match=r"metrics\.jsonl is shorter than its checkpoint says: copy it again"):
        runs.train(small(), unfinished, CPU, resume=True)


def test_resume_starts_afresh_where_there_is_nothing(tmp_path):
    assert runs.train(small("epochs=1"), tmp_path / "new", CPU, resume=True).finished


# ---------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [2, 7])
def test_signals_finish_the_step_and_save(tmp_path, whole, monkeypatch, number, at):
    calls, original = [0], bt.BulletTrain.updates

    def step(self, *args, **kwargs):
        calls[0] += 1
        if calls[0] == at + 1:  # the warm-up is the first
            signal.raise_signal(number)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(bt.BulletTrain, "updates", step)
    handler = signal.getsignal(number)
    result = runs.train(small(), tmp_path / "run", CPU)
    assert result.reason == f"stopped by signal {int(number)}"
    assert signal.getsignal(number) is handler
    assert read_weights(tmp_path / "run" / "last.safetensors")[1].step == at
    monkeypatch.undo()
    assert runs.train(small(), tmp_path / "run", CPU, resume=True).finished
    assert weights_of(tmp_path / "run") == weights_of(whole)


def test_a_signal_in_an_evaluation_does_not_wait_for_its_end(tmp_path, whole, monkeypatch):
    from bullettrain.evaluation import accuracy

    for at in (3, 14):  # in a validation, and in the final evaluation
        calls, original = [0], accuracy.correct

        def correct(*args, calls=calls, original=original, at=at):
            calls[0] += 1
            if calls[0] == at:
                signal.raise_signal(signal.SIGTERM)
            return original(*args)

        monkeypatch.setattr(accuracy, "correct", correct)
        result = runs.train(small(), tmp_path / str(at), CPU)
        assert result.signal == signal.SIGTERM
        assert calls[0] <= at + 1
        monkeypatch.undo()
        assert runs.train(small(), tmp_path / str(at), CPU, resume=True).finished
        assert weights_of(tmp_path / str(at)) == weights_of(whole)


# ---------------------------------------------------------------------------- a folder that is not free


def test_a_folder_in_use_is_refused(tmp_path, unfinished):
    folder = RunFolder(unfinished)
    folder.log({"kind": "step", "step": 10_000})  # of the process that holds it, since its last checkpoint
    records = folder.records()
    with folder.locked(), pytest.raises(RunError, match="is in use"):
        runs.train(small(), unfinished, CPU, resume=True)
    assert folder.records() == records
    (unfinished / "checkpoint.pt").unlink()  # nor before there is a checkpoint
    with folder.locked(), pytest.raises(RunError, match="is in use"):
        runs.train(small(), unfinished, CPU, resume=True)
    assert folder.records() == records


def test_of_two_that_begin_at_once_one_is_refused(tmp_path, monkeypatch):
    folder, load = RunFolder(tmp_path / "run"), runs.load_data

    def meanwhile(config, data_dir):
        with folder.locked():
            folder.create(config, {})
            folder.log({"kind": "step", "step": 1})
        return load(config, data_dir)

    monkeypatch.setattr(runs, "load_data", meanwhile)
    with pytest.raises(RunError, match="another process has trained in"):
        runs.train(small(), folder.path, CPU)
    assert folder.records() == [{"kind": "step", "step": 1}]
    with folder.locked(), pytest.raises(RunError, match="is in use"), RunFolder(folder.path).locked():
        pass


def test_a_run_that_ends_while_another_begins_is_left_as_it_is(tmp_path, monkeypatch):
    folder, load = RunFolder(tmp_path / "run"), runs.load_data
    folder.create(small(), {})  # begun, and without a checkpoint yet

    def meanwhile(config, data_dir):
        monkeypatch.setattr(runs, "load_data", load)
        assert runs.train(config, folder.path, CPU, resume=True).finished
        return load(config, data_dir)

    monkeypatch.setattr(runs, "load_data", meanwhile)
    with pytest.raises(RunError, match="another process has trained in"):
        runs.train(small(), folder.path, CPU, resume=True)
    assert runs.train(small(), folder.path, CPU, resume=True).finished
    assert sum(record["kind"] == "end" for record in folder.records()) == 1


def test_a_finished_run_is_not_trained_again(whole):
    before = weights_of(whole)
    result = runs.train(small(), whole, CPU, resume=True)
    assert result.finished
    assert set(result.accuracy) == {"last", "best", "averaged"}
    assert weights_of(whole) == before
    with pytest.raises(RunError, match="holds a finished run; choose another --out"):
        runs.train(small(), whole, CPU)


def test_an_unfinished_run_is_refused_with_the_command_that_continues_it(unfinished):
    with pytest.raises(RunError, match="unfinished run; continue it with: bullettrain train digits") as caught:
        runs.train(small(), unfinished, CPU)
    command = str(caught.value).partition("continue it with: ")[2].split()
    settings = [command[i + 1] for i, word in enumerate(command) if word == "--set"]
    assert recipe("digits").with_settings(settings) == small()
    assert command[-1] == "--resume"


def test_an_interrupted_comparison_says_how_to_go_on(tmp_path):
    killed(tmp_path / "both" / "baseline", "step", 8)
    with pytest.raises(RunError, match=r"unfinished comparison; continue it with: .*--compare .*--resume"):
        runs.compare(small(), tmp_path / "both", CPU)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=r"file/run: Not a directory|could not be written"):
        runs.train(small(), tmp_path / "file" / "run", CPU)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").write_text("not a run")
    with pytest.raises(RunError, match="is not a run; choose another --out"):
        runs.train(small(), tmp_path / "other", CPU)


# --------------------------------------------------------------------- what does not fit, or is damaged


def test_a_changed_configuration_is_refused_by_key(unfinished):
    with pytest.raises(RunError, match=r"optimizer\.lr is 0\.002 there and 0\.1 here"):
        runs.train(small("lr=0.1"), unfinished, CPU, resume=True)
    with pytest.raises(RunError, match=r"run of another configuration \(optimizer\.lr"):
        runs.train(small("lr=0.1"), unfinished, CPU)


def test_data_that_changed_is_refused(tmp_path):
    def write(n):
        labels = np.arange(n) % 3
        np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).random((n, 8, 8)).astype(np.float32), y=labels)

    config = small(f"data.name=npz:{tmp_path}/data.npz", "data.train_size=0", "data.test_size=0", "data.validation=0")
    write(200)
    assert killed(tmp_path / "run", "step", 8, config)
    write(210)
    with pytest.raises(RunError, match="its data has changed"):
        runs.train(config, tmp_path / "run", CPU, resume=True)


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "gone"])
def test_a_damaged_checkpoint_is_named(unfinished, damage):
    file = unfinished / "checkpoint.pt"
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
        assert runs.train(small(), unfinished, CPU, resume=True).finished  # no checkpoint: from the start
        return
    file.write_bytes({"cut": content[: len(content) // 2], "noise": b"\x00" * 100, "empty": b""}[damage])
    with pytest.raises(RunError, match=r"checkpoint\.pt is damaged .*; copy it again from where it was made") as caught:
        runs.train(small(), unfinished, CPU, resume=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["checkpoint.pt", "last.safetensors"])
def test_no_flipped_bit_is_resumed_from_or_evaluated(unfinished, name):
    file, rng = unfinished / name, np.random.default_rng(0)
    content = file.read_bytes()
    read = RunFolder(unfinished).load if name == "checkpoint.pt" else lambda: read_weights(file)
    for at in rng.integers(0, len(content), 200):
        changed = bytearray(content)
        changed[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(bytes(changed))
        with pytest.raises(RunError, match=f"{name} is damaged.*; (copy it again|delete it, and)"):
            read()


def test_a_full_disk_leaves_the_older_state(unfinished, monkeypatch):
    import bullettrain.run_folder.folder as folder_module

    before = {path.name: path.read_bytes() for path in unfinished.glob("*.*t*") if path.name != "metrics.jsonl"}
    real, calls = os.fsync, [0]

    def full(descriptor):
        calls[0] += 1
        if calls[0] > 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(folder_module.os, "fsync", full)
    with pytest.raises(RunError, match=r"could not be written.*No space left on device"):
        runs.train(small(), unfinished, CPU, resume=True)
    monkeypatch.undo()
    assert before["checkpoint.pt"] == (unfinished / "checkpoint.pt").read_bytes()
    assert not list(unfinished.glob(".*.new"))
    assert runs.train(small(), unfinished, CPU, resume=True).finished


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_foreign_bytes_are_no_traceback(unfinished, name):
    content = (unfinished / name).read_bytes()
    (unfinished / name).write_bytes(b"\xff\xfe\n" + content)
    if name == "config.yaml":
        with pytest.raises(RunError, match="cannot be read"):
            runs.train(small(), unfinished, CPU, resume=True)
    else:
        assert runs.train(small(), unfinished, CPU, resume=True).finished


def test_a_checkpoint_that_does_not_fit_is_no_traceback(unfinished):
    kept = RunFolder(unfinished).load()
    RunFolder(unfinished).save(kept._replace(state={k: v for k, v in kept.state.items() if k != "optimizer"}))
    with pytest.raises(RunError, match="does not fit: 'optimizer'"):
        runs.train(small(), unfinished, CPU, resume=True)


# ----------------------------------------------------------------------------------------- older formats

OLD = Path(__file__).parent / "old_run"
"""Of commit f70dca3."""


def test_a_run_of_format_1_loads_evaluates_and_reports(tmp_path):
    shutil.copytree(OLD, tmp_path / "old")
    config = RunFolder(tmp_path / "old").config()
    assert (config.training.paired_forward, config.training.cudnn_benchmark_after) == (True, 60.0)
    assert runs.train(config, tmp_path / "old", CPU, resume=True).finished  # which it is
    images = load_data(config, None)[2]
    network = bt.load(tmp_path / "old", weights="last")
    (clean,) = (r for r in kinds(OLD, "evaluation") if (r["weights"], r["attack"]) == ("last", "clean"))
    hits = network(images.images.float() / 255).argmax(dim=1) == images.labels
    assert float(hits.float().mean()) == pytest.approx(clean["accuracy"])
    assert write_report(tmp_path / "old").is_file()
    assert main_output("evaluate", str(tmp_path / "old"), "--attack", "clean", "--images", "50").exit_code == 0


def test_a_run_of_another_format_is_not_resumed(tmp_path):
    shutil.copytree(OLD, tmp_path / "old")
    folder, metrics = RunFolder(tmp_path / "old"), tmp_path / "old" / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(record)}\n" for record in folder.records() if record["kind"] != "end"))
    (tmp_path / "old" / "state.pt").touch()
    for resume in (True, False):
        with pytest.raises(RunError, match=r"trained by an older version, .* can be evaluated, not resumed"):
            runs.train(folder.config(), folder.path, CPU, resume=resume)
    text = (tmp_path / "old" / "config.yaml").read_text()
    (tmp_path / "old" / "config.yaml").write_text(f"format: 3\n{text}")
    with pytest.raises(RunError, match="has format 3; this version reads up to 2: update bullettrain"):
        folder.config()


def main_output(*words):
    return CliRunner().invoke(app, list(words))
