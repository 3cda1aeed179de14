"""The training command, end to end on small data: figures, folders, resuming, collapse, errors."""

import copy
import json
import math
import multiprocessing
import os
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing
import yaml
from PIL import Image

import bullettrain as bt
from bullettrain.data import load
from bullettrain.engine.group import GroupEngine
from bullettrain.evaluation import clean_accuracy
from bullettrain.evaluation.results import unpack
from bullettrain.reporting.run import read_run
from bullettrain.reporting.summary import evaluations
from bullettrain.reproduction.records import record_of, run_name
from bullettrain.training import Config, recipe
from bullettrain.training import run as runs
from bullettrain.training.collapse import CollapseError, WrongStreak, look_at_epoch, look_at_loss
from bullettrain.training.folder import RunError, RunFolder, read_weights
from bullettrain.training.judge import probe_images
from bullettrain.training.loop import Trainer
from bullettrain.training.optim import load_optimizer, make_optimizer
from bullettrain.training.settings import ConfigError
from bullettrain.training.setup import Place, load_data
from bullettrain.training.tally import Counts

CPU = Place(torch.device("cpu"))
FILES = {"config.yaml", "metrics.jsonl", "last.safetensors", "averaged.safetensors", "state.pt"}


def small(*settings: str) -> Config:
    """The digits recipe, cut down to a second or two."""
    cuts = ("epochs=3", "data.train_size=300", "data.test_size=100", "data.validation=60", "training.batch_size=50")
    rest = ("training.probe=20", "evaluation.steps=5", "method.boundary=3", "method.robust=1", "average=0.9")
    return recipe("digits").with_settings([*cuts, *rest, "log_every=2", *settings])


def weights_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / f"{name}.safetensors").read_bytes() for name in ("last", "best", "averaged")}


def kinds(folder: Path, kind: str) -> list[dict]:
    return [record for record in RunFolder(folder).records() if record["kind"] == kind]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    result = runs.train(small(), folder, CPU)
    assert result.finished
    return folder


# ------------------------------------------------------------------------------------------ what it leaves


def test_a_run_leaves_its_folder(whole):
    assert {path.name for path in whole.iterdir()} >= FILES | {"best.safetensors"}
    assert not [path for path in whole.iterdir() if path.name.startswith((".", "previous"))]
    saved = yaml.safe_load((whole / "config.yaml").read_text())
    environment = saved.pop("environment")
    assert Config.from_dict(saved) == small()
    assert environment["torch"] == torch.__version__
    assert {"commit", "device", "numpy", "python", "bullettrain", "command"} <= set(environment)


def test_the_last_figures_can_be_searched_for_in_half_precision(whole, tmp_path):
    result = runs.train(small("evaluation.search=bf16"), tmp_path, CPU)
    assert result.finished
    exact, half = kinds(whole, "evaluation"), kinds(tmp_path, "evaluation")
    assert [(r["weights"], r["attack"]) for r in half] == [(r["weights"], r["attack"]) for r in exact]
    for one, other in zip(exact, half, strict=True):
        clean = one["attack"] == "clean"
        assert other.get("precision") == (None if clean else "bf16")  # float32 says what a clean image is
        assert other["accuracy"] == pytest.approx(one["accuracy"], abs=0 if clean else 0.03)
    found = record_of(tmp_path).figures
    assert "precision" not in found["clean"]
    assert found["pgd5"]["precision"] == "bf16"
    assert "attacks searched in bf16, judged in float32" in evaluations(read_run(tmp_path)).note
    assert run_name(small("evaluation.search=bf16")) == run_name(small())  # what is learnt is the same


def test_eps_may_grow(tmp_path):
    config = small("objective=pgd-at", "beta=null", "ramp=0.5", "epochs=2", "attack_group=2")
    trainer = Trainer(config, RunFolder(tmp_path), CPU, load_data(config, None))
    objective, seen = trainer.engine.objective, []
    original = objective.corrupt

    def corrupt(*args, start, **kwargs):
        seen.append((objective.eps, (start - args[1]).abs().max().item(), args[5].max().item()))
        return original(*args, start=start, **kwargs)

    objective.corrupt = corrupt
    trainer.judge.probe = lambda *args: 0.9 * trainer.at.epoch  # a strong attack, while the own is still weak
    trainer._figures = lambda counts, figures=trainer._figures: {**figures(counts), "robust_accuracy": 0.9}
    assert trainer.run() == "finished"
    assert not kinds(tmp_path, "warning")
    steps, full = 2 * trainer.batches, config.method.eps
    seen = seen[-steps:]  # the warm-up's is the first
    assert [eps for eps, _, _ in seen] == pytest.approx([full * min(1, 2 * (i + 1) / steps) for i in range(steps)])
    for eps, farthest, size in seen:
        assert farthest <= eps * (1 + 1e-6)
        assert min(abs(size / eps - 2.25 / 3), abs(size / eps - 1.7)) < 1e-6  # three steps, or a robust example's one
    with pytest.raises(ConfigError, match=r"give method.scale in the place of step_size"):
        small("ramp=0.5", "method.step_size=0.1")


def test_records_tell_the_run(whole):
    epochs, steps, end = kinds(whole, "epoch"), kinds(whole, "step"), kinds(whole, "end")[0]
    assert [record["epoch"] for record in epochs] == [1, 2, 3]
    batches = math.ceil((300 - 60) / 50)
    assert steps[-1]["step"] == epochs[-1]["step"] == 3 * batches
    for record in [*steps, *epochs]:
        assert record["outlier"] + record["boundary"] + record["robust"] == pytest.approx(1)
        assert 0 <= record["robust_accuracy"] <= record["clean_accuracy"] + 0.1
    # The run's averages are those of its steps, counted once.
    assert end["examples"] == 3 * 240
    assert end["work"] == pytest.approx(sum(e["work"] for e in epochs) / 3)
    assert end["plain_work"] == 1 + 2 * 3 + 6
    assert end["work_speedup"] == pytest.approx(end["plain_work"] / end["work"])
    budget = bt.StepBudget(3, 1)
    share = {key: end[key] for key in ("outlier", "boundary", "robust")}
    assert end["theoretical_speedup"] == pytest.approx(bt.theoretical_speedup(budget, **share))
    batch = kinds(whole, "batch")[-1]
    assert len(batch["svar"]) == len(batch["steps"]) == len(batch["category"]) == 40
    figures = {(e["weights"], e["attack"]) for e in kinds(whole, "evaluation")}
    assert figures == {(w, a) for w in ("last", "best", "averaged") for a in ("clean", "pgd5")}


def test_load_gives_the_network_back(whole):
    test = load("digits", split="test")
    x = test.images.float() / 255
    networks = {name: bt.load(whole, weights=name) for name in ("last", "best", "averaged")}
    assert torch.equal(networks["last"](x), bt.load(whole / "last.safetensors")(x))
    assert torch.equal(networks["best"](x), bt.load(whole)(x))  # it has a validation set
    assert not networks["last"].training
    best = max(kinds(whole, "epoch"), key=lambda r: (r["validation_robust"], r["validation_clean"], -r["epoch"]))
    assert read_weights(whole / "best.safetensors")[1]["epoch"] == best["epoch"]
    with pytest.raises(RunError, match="last, best, averaged"):
        bt.load(whole, weights="first")
    with pytest.raises(RunError, match="is missing"):
        bt.load(whole / "nothing.safetensors")


def test_the_digits_recipe_is_robust_where_plain_training_is_not(tmp_path):
    shorter = ("epochs=20", "training.probe=0", "data.validation=0")
    robust = runs.train(recipe("digits").with_settings(shorter), tmp_path / "robust", CPU)
    plain_steps = ("method.boundary=0", "method.robust=0", "method.outlier=0")
    plain = runs.train(recipe("digits").with_settings([*shorter, *plain_steps]), tmp_path / "plain", CPU)
    assert plain.accuracy["last"]["clean"] > 0.9
    assert plain.accuracy["last"]["pgd20"] < 0.45
    assert robust.accuracy["last"]["clean"] > 0.9
    assert robust.accuracy["last"]["pgd20"] > 0.55


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
@pytest.mark.parametrize("objective", ["trades", "mart", "pgd-at"])
def test_slices_of_real_data(tmp_path, real_data, name, objective):
    settings = [f"data.name={name}", "data.train_size=1000", "data.test_size=200", "data.validation=100", "epochs=2"]
    if name == "cifar10":
        settings += ["data.crop=4", "data.flip=true", "eps=8/255"]
    beta = "null" if objective == "pgd-at" else "6"
    config = recipe("digits").with_settings([*settings, f"objective={objective}", f"beta={beta}", "probe=50"])
    result = runs.train(config, tmp_path / "run", CPU, data_dir=real_data)
    assert result.finished
    first, last = kinds(tmp_path / "run", "epoch")
    assert last["loss"] < first["loss"]
    assert result.accuracy["last"]["clean"] > 0.12


def test_ones_own_images(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(60):
        folder = tmp_path / "images" / ("dark" if i % 2 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        level = 60 if i % 2 else 190
        Image.fromarray(rng.integers(level - 40, level + 40, (12, 12, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    images, labels = rng.random((60, 12, 12)), np.arange(60) % 3
    images[labels == 1] *= 0.3
    np.savez(tmp_path / "arrays.npz", x=images.astype(np.float32), y=labels)
    for name in (f"folder:{tmp_path}/images", f"npz:{tmp_path}/arrays.npz"):
        settings = (f"data.name={name}", "data.train_size=0", "data.test_size=0", "data.validation=0", "epochs=2")
        result = runs.train(small(*settings), tmp_path / name[:3], CPU)
        assert result.finished
        assert bt.load(result.folder)(torch.rand(2, 3 if "folder" in name else 1, 12, 12)).shape[0] == 2


# ---------------------------------------------------------------------------------------- nothing is lost


def killing_self(place, at):
    """SIGKILL this process at the at-th call of a place in the code, before or after it."""
    import bullettrain.training.folder as folder_module

    targets = {"replace": (folder_module.os, "replace"), "step": (bt.BulletTrain, "step"), "log": (RunFolder, "log")}
    owner, name = targets[place.split("-")[0]]
    original, calls = getattr(owner, name), [0]

    def wrapped(*args, **kwargs):
        calls[0] += 1
        if calls[0] == at and not place.endswith("after"):
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapped)


def doomed(folder, place, at):
    killing_self(place, at)
    runs.train(small(), folder, CPU, resume=True)


def killed(folder, place, at):
    """Run in a process of its own that is killed at a point; whether it was killed."""
    process = multiprocessing.get_context("fork").Process(target=doomed, args=(folder, place, at))
    process.start()
    process.join()
    return process.exitcode == -signal.SIGKILL


KILLS = [("step", 1), ("step", 8), ("step-after", 13), ("log", 6), ("log-after", 11)]
KILLS += [("replace", n) for n in range(1, 20)]  # every moment at which a file is renewed


@pytest.mark.parametrize(("place", "at"), KILLS)
def test_a_killed_run_resumes_and_ends_bit_for_bit(tmp_path, whole, place, at):
    folder = tmp_path / "run"
    assert killed(folder, place, at)
    result = runs.train(small(), folder, CPU, resume=True)
    assert result.finished
    assert weights_of(folder) == weights_of(whole)
    assert [r["step"] for r in kinds(folder, "step")] == [r["step"] for r in kinds(whole, "step")]
    assert [r["loss"] for r in kinds(folder, "epoch")] == [r["loss"] for r in kinds(whole, "epoch")]
    assert len(kinds(folder, "end")) == 1
    assert not [path for path in folder.iterdir() if path.name.startswith("previous")]


def test_every_renewal_of_a_file_was_killed_at_once(tmp_path):
    assert killed(tmp_path / "a", "replace", 19)
    assert not killed(tmp_path / "b", "replace", 20)


def test_every_process_of_a_resumed_run_reads_the_checkpoint_that_a_kill_left_in_halves(tmp_path):
    halves = 0
    for at in range(8, 20):
        folder = RunFolder(tmp_path / str(at))
        assert killed(folder.path, "replace", at)
        if not (folder.has_checkpoint() and (folder.path / "previous.safetensors").exists()):
            continue
        before, (first, state), (second, _) = sorted(folder.path.iterdir()), folder.load(), folder.load()
        assert sorted(folder.path.iterdir()) == before
        assert all(torch.equal(first[key], second[key]) for key in first)
        halves += read_weights(folder.path / "previous.safetensors")[1]["step"] == state["step"]
        folder.settle(state["step"])
        last, about = read_weights(folder.path / "last.safetensors")
        assert about["step"] == state["step"]
        assert all(torch.equal(first[key], last[key]) for key in first)
    assert halves >= 2


@pytest.mark.parametrize("points", [(9, 6, 4), (11, 4), (11, 5), (17, 4), (17, 5), (12, 6), (15, 6), (16, 5)])
def test_a_run_killed_again_and_again_ends_bit_for_bit(tmp_path, whole, points):
    folder = tmp_path / "run"
    for at in points:
        killed(folder, "replace", at)
    assert runs.train(small(), folder, CPU, resume=True).finished
    assert weights_of(folder) == weights_of(whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [2, 7])
def test_signals_finish_the_step_and_save(tmp_path, whole, monkeypatch, number, at):
    calls, original = [0], bt.BulletTrain.step

    def step(self, *args, **kwargs):
        calls[0] += 1
        if calls[0] == at + 1:  # the warm-up is the first
            signal.raise_signal(number)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(bt.BulletTrain, "step", step)
    handler = signal.getsignal(number)
    result = runs.train(small(), tmp_path / "run", CPU)
    assert result.reason == f"stopped by signal {int(number)}"
    assert signal.getsignal(number) is handler
    assert read_weights(tmp_path / "run" / "last.safetensors")[1]["step"] == at
    monkeypatch.undo()
    assert runs.train(small(), tmp_path / "run", CPU, resume=True).finished
    assert weights_of(tmp_path / "run") == weights_of(whole)


def test_a_signal_in_an_evaluation_does_not_wait_for_its_end(tmp_path, whole, monkeypatch):
    from bullettrain.evaluation import rounds, survival

    for at in (3, 14):  # in a validation, and in the final evaluation
        calls, original = [0], survival.correct

        def correct(*args, calls=calls, original=original, at=at):
            calls[0] += 1
            if calls[0] == at:
                signal.raise_signal(signal.SIGTERM)
            return original(*args)

        monkeypatch.setattr(survival, "correct", correct)
        monkeypatch.setattr(rounds, "correct", correct)
        result = runs.train(small(), tmp_path / str(at), CPU)
        assert result.signal == signal.SIGTERM
        assert calls[0] <= at + 1
        monkeypatch.undo()
        assert runs.train(small(), tmp_path / str(at), CPU, resume=True).finished
        assert weights_of(tmp_path / str(at)) == weights_of(whole)


def test_a_folder_in_use_is_refused(tmp_path, unfinished):
    folder = RunFolder(unfinished)
    folder.log({"kind": "step", "step": 10_000})  # of the process that holds it, since its last checkpoint
    records = folder.records()
    with folder.alone(), pytest.raises(RunError, match="is in use"):
        runs.train(small(), unfinished, CPU, resume=True)
    assert folder.records() == records
    for name in ("state.pt", "last.safetensors"):  # nor before there is a checkpoint
        (unfinished / name).unlink()
    with folder.alone(), pytest.raises(RunError, match="is in use"):
        runs.train(small(), unfinished, CPU, resume=True)
    assert folder.records() == records


def test_of_two_that_begin_at_once_one_is_refused(tmp_path, monkeypatch):
    folder, load = RunFolder(tmp_path / "run"), runs.load_data

    def meanwhile(config, data_dir):
        with folder.alone():
            folder.create(config, {})
            folder.log({"kind": "step", "step": 1})
        return load(config, data_dir)

    monkeypatch.setattr(runs, "load_data", meanwhile)
    with pytest.raises(RunError, match="another process has trained in"):
        runs.train(small(), folder.path, CPU)
    assert folder.records() == [{"kind": "step", "step": 1}]
    with folder.alone(), pytest.raises(RunError, match="is in use"), RunFolder(folder.path).alone():
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


def test_what_cannot_be_had_is_kept_with_the_run(tmp_path):
    result = runs.train(small("engine=graphs", "epochs=1"), tmp_path / "run", CPU)
    assert len(result.end["notes"]) == 1
    assert result.end["notes"][0].startswith("CUDA graphs are off")


def test_data_that_changed_is_refused(tmp_path):
    def write(n):
        labels = np.arange(n) % 3
        np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).random((n, 8, 8)).astype(np.float32), y=labels)

    config = small(f"data.name=npz:{tmp_path}/data.npz", "data.train_size=0", "data.test_size=0", "data.validation=0")
    write(200)

    def child():
        killing_self("step", 8)
        runs.train(config, tmp_path / "run", CPU)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    write(210)
    with pytest.raises(RunError, match="its data has changed"):
        runs.train(config, tmp_path / "run", CPU, resume=True)


def test_saving_within_an_epoch_changes_nothing(tmp_path, whole):
    config = small("save_minutes=0")
    assert killed_within(tmp_path / "run", config)
    runs.train(config, tmp_path / "run", CPU, resume=True)
    assert weights_of(tmp_path / "run") == weights_of(whole)


def killed_within(folder, config):
    def child():
        killing_self("step", 9)
        runs.train(config, folder, CPU)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    state = torch.load(folder / "state.pt", weights_only=True)
    return process.exitcode == -signal.SIGKILL and state["position"]["index"] > 0


def test_the_state_is_loadable_without_code(whole):
    state = torch.load(whole / "state.pt", weights_only=True)
    assert {"optimizer", "engine", "average", "rng", "position"} <= set(state)


def test_resume_starts_afresh_where_there_is_nothing(tmp_path):
    assert runs.train(small("epochs=1"), tmp_path / "new", CPU, resume=True).finished


def test_a_finished_run_is_not_trained_again(whole):
    before = weights_of(whole)
    result = runs.train(small(), whole, CPU, resume=True)
    assert result.finished
    assert set(result.accuracy) == {"last", "best", "averaged"}
    assert weights_of(whole) == before
    with pytest.raises(RunError, match="holds a finished run; choose another --out"):
        runs.train(small(), whole, CPU)


@pytest.fixture
def unfinished(tmp_path):
    folder = tmp_path / "run"
    assert killed(folder, "step", 10)
    return folder


def test_an_unfinished_run_is_refused_with_the_command_that_continues_it(unfinished):
    with pytest.raises(RunError, match="unfinished run; continue it with: bullettrain train digits") as caught:
        runs.train(small(), unfinished, CPU)
    command = str(caught.value).partition("continue it with: ")[2].split()
    settings = [command[i + 1] for i, word in enumerate(command) if word == "--set"]
    assert recipe("digits").with_settings(settings) == small()
    assert command[-1] == "--resume"


def test_a_changed_configuration_is_refused_by_key(unfinished):
    with pytest.raises(RunError, match=r"optimizer\.lr is 0\.002 there and 0\.1 here"):
        runs.train(small("lr=0.1"), unfinished, CPU, resume=True)
    with pytest.raises(RunError, match=r"run of another configuration \(optimizer\.lr"):
        runs.train(small("lr=0.1"), unfinished, CPU)


@pytest.mark.parametrize("name", ["state.pt", "last.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "gone"])
def test_a_damaged_checkpoint_is_named(unfinished, name, damage):
    file = unfinished / name
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes({"cut": content[: len(content) // 2], "noise": b"\x00" * 100, "empty": b""}[damage])
    if (name, damage) == ("state.pt", "gone"):
        assert runs.train(small(), unfinished, CPU, resume=True).finished  # no checkpoint: from the start
        return
    with pytest.raises(RunError, match=f"{name}.*damaged|{name}.*missing") as caught:
        runs.train(small(), unfinished, CPU, resume=True)
    assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_the_older_state(unfinished, monkeypatch):
    import bullettrain.training.folder as folder_module

    before = {path.name: path.read_bytes() for path in unfinished.glob("*.*t*") if path.name != "metrics.jsonl"}
    real, calls = os.fsync, [0]

    def full(descriptor):
        calls[0] += 1
        if calls[0] > 3:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(folder_module.os, "fsync", full)
    with pytest.raises(RunError, match=r"could not be written.*No space left on device"):
        runs.train(small(), unfinished, CPU, resume=True)
    monkeypatch.undo()
    assert before["state.pt"] == (unfinished / "state.pt").read_bytes()
    assert not list(unfinished.glob(".last*.new"))
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
    state = torch.load(unfinished / "state.pt", weights_only=True)
    del state["optimizer"]
    torch.save(state, unfinished / "state.pt")
    with pytest.raises(RunError, match="does not fit: 'optimizer'"):
        runs.train(small(), unfinished, CPU, resume=True)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=r"file/run: Not a directory|could not be written"):
        runs.train(small(), tmp_path / "file" / "run", CPU)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").write_text("not a run")
    with pytest.raises(RunError, match="is no run; choose another --out"):
        runs.train(small(), tmp_path / "other", CPU)


# ------------------------------------------------------------------------------------------------ collapse


def test_a_loss_of_nan_stops_the_run_and_keeps_the_last_good_state(tmp_path, monkeypatch):
    original = bt.TRADES.loss
    calls = [0]

    def loss(self, *args):
        calls[0] += 1
        return original(self, *args) * (float("nan") if calls[0] > 8 else 1.0)

    monkeypatch.setattr(bt.TRADES, "loss", loss)
    with pytest.raises(CollapseError, match="NaN"):
        runs.train(small(), tmp_path / "run", CPU)
    monkeypatch.undo()
    tensors, about = read_weights(tmp_path / "run" / "last.safetensors")
    assert about["epoch"] == 1
    assert all(torch.isfinite(t).all() for t in tensors.values())
    assert kinds(tmp_path / "run", "warning")[0]["message"].startswith("the ")
    assert kinds(tmp_path / "run", "end")[0]["reason"].startswith("collapsed")
    assert runs.train(small(), tmp_path / "run", CPU, resume=True).finished  # and it can go on from there


def test_nan_weights_are_noticed(tmp_path):
    with pytest.raises(CollapseError, match=r"NaN|infinite"):
        runs.train(small("lr=1e30", "optimizer.name=sgd", "epochs=40", "log_every=1"), tmp_path / "run", CPU)


def test_what_has_collapsed_is_not_saved(tmp_path, monkeypatch):
    original, calls = bt.TRADES.loss, [0]

    def loss(self, *args):
        calls[0] += 1
        return original(self, *args) * (float("nan") if calls[0] > 8 else 1.0)

    monkeypatch.setattr(bt.TRADES, "loss", loss)
    with pytest.raises(CollapseError, match="NaN"):  # though a checkpoint is due after every step
        runs.train(small("save_minutes=0", "log_every=50"), tmp_path / "run", CPU)
    tensors, about = read_weights(tmp_path / "run" / "last.safetensors")
    assert all(torch.isfinite(t).all() for t in tensors.values())
    assert about["step"] == 7
    assert kinds(tmp_path / "run", "end")[0]["seconds"] > 0
    assert (tmp_path / "run" / "report.html").exists()


def test_training_against_an_attack_that_is_too_weak_is_noticed(tmp_path):
    weak = ("method.boundary=1", "method.robust=1", "method.outlier=1", "method.step_size=0.001", "eps=0.3")
    settings = ("objective=trades", "epochs=40", "data.validation=0", "lr=5e-3", *weak)
    with pytest.raises(CollapseError, match="catastrophic overfitting"):
        runs.train(recipe("digits").with_settings(settings), tmp_path / "run", CPU)
    end = kinds(tmp_path / "run", "end")[0]
    assert 0 < end["epochs"] < 40
    assert read_weights(tmp_path / "run" / "last.safetensors")[1]["epoch"] == end["epochs"]  # before the collapse


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
    counts = Counts()
    counts.sums.update(examples=600, outlier=600, loss=1200.0)
    streak = WrongStreak(selects=True, has_clean=True)
    assert streak.look(counts) is None  # too few to tell
    assert "outlier" in streak.look(counts)
    counts.sums.update(outlier=599)
    assert streak.look(counts) is None
    assert look_at_loss(counts) is None
    counts.sums.update(loss=math.inf)
    assert "infinite" in look_at_loss(counts)
    plain = WrongStreak(selects=False, has_clean=True)
    counts.sums.update(examples=2000, outlier=0, clean=0)
    assert "outlier" in plain.look(counts)  # a baseline has no outliers, but clean predictions
    attacked = WrongStreak(selects=False, has_clean=False)  # PGD-AT's baseline sees no clean predictions
    counts.sums.update(examples=2000, robust_hits=0)
    assert [attacked.look(counts) for _ in range(9)] == [None] * 9  # as it is with a large eps at first
    assert "no attacked example" in attacked.look(counts)
    views = WrongStreak(selects=False, has_clean=False, attacks=False)  # AugMix without the JSD
    assert "outlier" in views.look(counts)
    assert "catastrophic" in look_at_epoch(0.7, 0.01, classes=10)
    fine = [(0.7, 0.3, 10), (0.2, 0.0, 10), (0.7, None, 10), (0.6, 0.0, 2)]  # the last: little above chance
    assert [look_at_epoch(robust, probe, classes=k) for robust, probe, k in fine] == [None] * 4


def test_the_probe_has_every_class():
    train = load("digits", split="train")
    by_class = train.subset(train.labels.argsort())
    assert torch.bincount(probe_images(by_class, 50).labels).min() >= 4


# -------------------------------------------------------------------------------- several processes, groups


def spawned(rank, port, folder, settings):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ["WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    from bullettrain.training.setup import find_place, leave_group

    place = find_place("cpu")
    runs.train(small("optimizer.name=sgd", *settings), Path(folder), place)
    leave_group()


# SGD: Adam turns the rounding of a gradient near 0 into a whole step.
@pytest.mark.parametrize(
    "settings", [("optimizer.name=sgd",), ("optimizer.name=sgd", "accumulate=2", "objective=mart")]
)
def test_two_processes_train_what_one_trains(tmp_path, settings):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(spawned, args=(port, str(tmp_path / "two"), settings), nprocs=2)
    one = runs.train(small("optimizer.name=sgd", *settings), tmp_path / "one", CPU)
    for name in ("last", "averaged"):
        mine, theirs = (read_weights(tmp_path / n / f"{name}.safetensors")[0] for n in ("one", "two"))
        for key, value in mine.items():
            assert torch.allclose(value, theirs[key], atol=2e-5), key
    a, b = kinds(tmp_path / "one", "epoch"), kinds(tmp_path / "two", "epoch")
    assert [r["outlier"] for r in a] == pytest.approx([r["outlier"] for r in b], abs=0.01)
    assert [r["loss"] for r in a] == pytest.approx([r["loss"] for r in b], rel=1e-3)
    assert [r["robust_fraction"] for r in a] == pytest.approx([r["robust_fraction"] for r in b], abs=0.01)
    assert one.end["work"] == pytest.approx(kinds(tmp_path / "two", "end")[0]["work"], rel=0.02)


@pytest.mark.parametrize("name", ["adam", "sgd"])
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
        group.update(lr=torch.tensor(0.01), fused=name == "sgd", **({"capturable": True} if name == "adam" else {}))
    load_optimizer(again, state)
    again.step()
    optimizer.step()
    assert all(isinstance(group["lr"], float) and not group.get("capturable") for group in again.param_groups)
    for a, b in zip(again.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)


def test_a_fresh_that_does_not_fit_is_said_in_a_line(tmp_path):
    with pytest.raises(ConfigError, match="fresh is 5"):
        runs.train(small("attack_group=2", "fresh=5"), tmp_path / "run", CPU)


def test_the_reported_accuracy_is_that_of_the_saved_weights(tmp_path):
    """With batch norm every process has statistics of its own while it trains."""
    settings = (
        "network.name=wrn-10-1",
        "epochs=2",
        "data.validation=0",
        "training.probe=0",
        "evaluation.batch_size=30",
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(spawned, args=(port, str(tmp_path / "two"), settings), nprocs=2)
    (test,) = (load_data(small(*settings), None)[2],)
    for name in ("last", "averaged"):
        said = [e for e in kinds(tmp_path / "two", "evaluation") if (e["weights"], e["attack"]) == (name, "clean")]
        network = bt.load(tmp_path / "two", weights=name)
        assert said[0]["accuracy"] == clean_accuracy(network, test, device=CPU.device)


def test_accumulation_updates_once_a_group(tmp_path, monkeypatch):
    updates, original = [0], torch.optim.Adam.step

    def step(self, *args, **kwargs):
        updates[0] += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    runs.train(small("accumulate=2", "epochs=2"), tmp_path / "run", CPU)
    assert updates[0] == 2 * 3 + 1  # five batches an epoch: groups of 2, 2 and 1; and the warm-up


@pytest.mark.parametrize(
    "settings",
    [
        ("precision=bf16", "channels_last=true"),
        ("optimizer.clip=0.5", "optimizer.name=sgd", "nesterov=true", "weight_decay=5e-4", "decay_norms=false"),
        ("norm=l2", "eps=0.5"),
        ("separation=oracle", "average=0"),
        ("score=margin", "training.compile=true"),
        ("network.name=preact-resnet-18", "data.train_size=100", "data.validation=0", "epochs=1", "training.probe=0"),
    ],
)
def test_settings_run(tmp_path, settings):
    torch.compiler.reset()
    result = runs.train(small("epochs=2", *settings), tmp_path / "run", CPU)
    assert result.finished


def test_the_captured_average_is_the_plain_one(tmp_path):
    """Weights, statistics and counts, as `AveragedModel` moves them."""
    config = small("attack_group=2", "training.average=0.75", "network.name=wrn-10-1")
    trainer = Trainer(config, RunFolder(tmp_path), CPU, load_data(config, None))
    for step in range(3):
        with torch.no_grad():
            for t in (*trainer.network.parameters(), *trainer.network.buffers()):
                t.add_(step + 1)
        theirs = copy.deepcopy(trainer.average)
        if step == 0:
            trainer.average.update_parameters(trainer.network)  # the first copies
        else:
            trainer.average.move(trainer.network)
        theirs.update_parameters(trainer.network)
        for (key, mine), expected in zip(
            trainer.average.state_dict().items(), theirs.state_dict().values(), strict=True
        ):
            assert torch.allclose(mine, expected, atol=1e-6), key


@pytest.mark.parametrize("settings", [("attack_group=3",), ("attack_group=2", "fresh=1", "objective=mart")])
def test_groups_train_and_resume_bit_for_bit(tmp_path, monkeypatch, settings):
    config = small(*settings)
    assert runs.train(config, tmp_path / "whole", CPU).finished
    calls, original = [0], GroupEngine.step

    def step(self, batches):
        calls[0] += 1
        if calls[0] == 3:
            signal.raise_signal(signal.SIGINT)
        return original(self, batches)

    monkeypatch.setattr(GroupEngine, "step", step)
    assert runs.train(config, tmp_path / "cut", CPU).reason.startswith("stopped")
    monkeypatch.undo()
    assert runs.train(config, tmp_path / "cut", CPU, resume=True).finished
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")


def test_a_group_of_one_trains_what_the_plain_engine_trains(tmp_path, whole):
    """The group engine at once, through the whole command."""
    config = small("attack_group=2")
    runs.train(config, tmp_path / "two", CPU)
    ours, theirs = kinds(tmp_path / "two", "end")[0], kinds(whole, "end")[0]
    assert ours["plain_work"] == theirs["plain_work"]
    assert ours["work"] == pytest.approx(theirs["work"], rel=0.2)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (("engine=graphs",), "there is no CUDA device"),
        (("attack_group=2", "accumulate=2"), "gradients are accumulated"),
        (("attack_group=2", "separation=oracle"), "looks at the network"),
    ],
)
def test_what_the_fast_engine_cannot_do_is_said_in_a_line(tmp_path, settings, line):
    from rich.console import Console

    console = Console(record=True, width=200)
    assert runs.train(small("epochs=1", *settings), tmp_path / "run", CPU, console=console).finished
    assert line in console.export_text()


def test_comparison(tmp_path):
    baseline, mined = runs.compare(small(), tmp_path / "both", CPU)
    figures = json.loads((tmp_path / "both" / "comparison.json").read_text())
    assert [row["name"] for row in figures["rows"]] == ["baseline", "bullettrain"]
    assert figures["rows"][0]["work"] == 13
    assert figures["speedup"]["work"] == pytest.approx(13 / mined.end["work"])
    assert figures["speedup"]["wall_clock"] == pytest.approx(baseline.end["seconds"] / mined.end["seconds"])
    assert all((tmp_path / "both" / name / "report.html").exists() for name in ("", "baseline", "bullettrain"))
    for attack, about in figures["errors"].items():  # from the images on which the two differ
        plain, own = (unpack(r.judged[r.chosen][attack]["survived"], 100) for r in (baseline, mined))
        b, c = int((own & ~plain).sum()), int((plain & ~own).sum())
        assert own.double().mean() == pytest.approx(mined.accuracy[mined.chosen][attack], abs=1e-12)
        assert about == {"error": pytest.approx((b + c - (b - c) ** 2 / 100) ** 0.5 / 100), "paired": True}
    for record in baseline.judged[baseline.chosen].values():  # as of a run before outcomes were kept
        del record["survived"]
    shares = [result.accuracy[result.chosen]["clean"] for result in (baseline, mined)]
    unpaired = sum(share * (1 - share) / 100 for share in shares) ** 0.5
    assert runs.comparison(baseline, mined)["errors"]["clean"] == {"error": pytest.approx(unpaired), "paired": False}
    with pytest.raises(RunError, match="finished comparison"):
        runs.compare(small(), tmp_path / "both", CPU)


def test_an_interrupted_comparison_says_how_to_go_on(tmp_path):
    killed(tmp_path / "both" / "baseline", "step", 8)
    with pytest.raises(RunError, match=r"unfinished comparison; continue it with: .*--compare .*--resume"):
        runs.compare(small(), tmp_path / "both", CPU)
