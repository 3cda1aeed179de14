"""`bullettrain.load` of what no run left: what it is, and what to give instead."""

import os
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bullettrain as bt
from bullettrain.errors import UserError
from bullettrain.loading import FORMS
from bullettrain.run_folder import RunError

GIVE = "; give a run's folder or one of its .safetensors files"
NEITHER = "not a checkpoint: it is neither safetensors nor a file of torch.save"
NAME = "; name it, e.g. --network wrn-34-10 (in Python: network=…)"


def told(path, **options):
    with pytest.raises(RunError) as error:
        bt.load(path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


FILES = {
    "text.pt": (lambda p: p.write_text("hello, this is text"), NEITHER),
    "text.safetensors": (lambda p: p.write_text('version {"a": 1}'), NEITHER),
    "empty.pt": (lambda p: p.write_bytes(b""), "not a checkpoint: it is empty"),
    "noise.pt": (lambda p: p.write_bytes(bytes(range(256))), NEITHER),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_no_run_left(tmp_path, name):
    make, what = FILES[name]
    make(tmp_path / name)
    assert told(tmp_path / name) == f"{tmp_path / name} is {what}; give {FORMS}"


def test_weights_that_do_not_say_what_they_are_of(tmp_path):
    linear = nn.Linear(2, 2).state_dict()
    save_file(linear, tmp_path / "new.safetensors")
    torch.save(linear, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("new.safetensors", "old.pt"):
        assert told(tmp_path / name).startswith(f"{tmp_path / name} does not say which network it is of (it holds ")
        assert told(tmp_path / name).endswith(NAME)
    torch.save({"weights": 3}, tmp_path / "dict.pt")
    assert "holds no state_dict; save the network's state_dict() with torch.save" in told(tmp_path / "dict.pt")
    assert "is no network (no such file or folder); give a run's folder" in told(tmp_path / "nothing.safetensors")


def test_paths_that_nobody_can_have(tmp_path):
    with pytest.raises(UserError, match="~nosuch/run: there is no user called 'nosuch' here"):
        bt.load("~nosuch/run")
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "is no network" in told(tmp_path / "pipe.safetensors")  # and is not waited for


def test_a_checkpoint_that_was_cut_is_damaged(tmp_path, robust_run):
    whole = (robust_run / "last.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "cut.safetensors is damaged" in told(tmp_path / "cut.safetensors")
    (tmp_path / "last.safetensors").write_bytes(b"")
    assert "last.safetensors is not a checkpoint: it is empty" in told(tmp_path)


@pytest.mark.parametrize("name", ["checkpoint.pt", "config.yaml", "samples.safetensors", "none.safetensors"])
def test_other_files_of_a_run_name_the_run(robust_run, name):
    assert told(robust_run / name).endswith(f"; give {robust_run}, the run that it lies in")


def test_folders_that_are_no_run(tmp_path, robust_run):
    empty, other, both = (tmp_path / name for name in ("empty", "other", "both"))
    for folder in (empty, other, both):
        folder.mkdir()
    assert told(empty) == f"{empty} is not a run: it is empty{GIVE}"
    (other / "thing").write_text("no run")
    assert told(other) == f"{other} is not a run: it has no config.yaml{GIVE}"
    (both / "comparison.json").write_text("{}")
    for name in ("baseline", "bullettrain"):
        shutil.copytree(robust_run, both / name)
    runs = f"{both}/baseline, {both}/bullettrain"
    assert told(both) == f"{both} is not a run but a folder of runs; give one of them: {runs}"


def test_weights_that_a_run_has_not(tmp_path, robust_run):
    assert told(robust_run, weights="best") == f"{robust_run} has no 'best' weights; it has last, averaged"
    assert "there are last, best, averaged; did you mean 'averaged'?" in told(robust_run, weights="averagd")
    file = robust_run / "last.safetensors"
    assert told(file, weights="averaged").startswith(f"--weights was given, but {file} is a file")
    shutil.copy(robust_run / "config.yaml", tmp_path)
    assert told(tmp_path) == f"{tmp_path} has no 'last' weights; it has none yet"


def test_weights_alone_need_no_run(tmp_path, robust_run):
    shutil.copy(robust_run / "last.safetensors", tmp_path)
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(bt.load(tmp_path)(x), bt.load(robust_run)(x))
