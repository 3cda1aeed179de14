"""`bullettrain.load` of what no run left: what it is, and what to give instead."""

import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bullettrain as bt
from bullettrain.run_folder import RunError

GIVE = "; give a run's folder or one of its .safetensors files"


def told(path, **options):
    with pytest.raises(RunError) as error:
        bt.load(path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


FILES = {
    "text.pt": (lambda p: p.write_text("hello, this is text"), "no checkpoint: it is a text file"),
    "accents.pt": (lambda p: p.write_text("é" * 1000), "no checkpoint: it is a text file"),
    "text.safetensors": (lambda p: p.write_text('version {"a": 1}'), "no checkpoint: it is a text file"),
    "empty.pt": (lambda p: p.write_bytes(b""), "no checkpoint: it is empty"),
    "noise.pt": (
        lambda p: p.write_bytes(bytes(range(256))),
        "no checkpoint: it is neither safetensors nor a file of torch.save",
    ),
    "dict.pt": (lambda p: torch.save({"weights": 3}, p), "no checkpoint: it is a file of torch.save"),
    "old.pt": (
        lambda p: torch.save({}, p, _use_new_zipfile_serialization=False),
        "no checkpoint: it is a file of torch.save",
    ),
    "other.safetensors": (
        lambda p: save_file(nn.Linear(2, 2).state_dict(), p),
        "no checkpoint of a run: it holds bias, weight, and does not say of which network",
    ),
    "nothing.safetensors": (lambda p: None, "missing"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_no_run_left(tmp_path, name):
    make, what = FILES[name]
    make(tmp_path / name)
    assert told(tmp_path / name) == f"{tmp_path / name} is {what}{GIVE}"


def test_a_checkpoint_that_was_cut_is_damaged(tmp_path, robust_run):
    whole = (robust_run / "last.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "cut.safetensors is damaged" in told(tmp_path / "cut.safetensors")
    (tmp_path / "last.safetensors").write_bytes(b"")
    assert "last.safetensors is damaged" in told(tmp_path)


@pytest.mark.parametrize("name", ["state.pt", "config.yaml", "samples.safetensors", "none.safetensors"])
def test_other_files_of_a_run_name_the_run(robust_run, name):
    assert told(robust_run / name).endswith(f"; give {robust_run}, the run that it lies in")


def test_folders_that_are_no_run(tmp_path, robust_run):
    empty, other, both = (tmp_path / name for name in ("empty", "other", "both"))
    for folder in (empty, other, both):
        folder.mkdir()
    assert told(empty) == f"{empty} is no run: it is empty{GIVE}"
    (other / "thing").write_text("no run")
    assert told(other) == f"{other} is no run: it has no config.yaml{GIVE}"
    (both / "comparison.json").write_text("{}")
    for name in ("baseline", "bullettrain"):
        shutil.copytree(robust_run, both / name)
    runs = f"{both}/baseline, {both}/bullettrain"
    assert told(both) == f"{both} is no run but a folder of runs; give one of them: {runs}"


def test_weights_that_a_run_has_not(tmp_path, robust_run):
    assert told(robust_run, weights="best") == f"{robust_run} has no 'best' weights; it has last, averaged"
    assert "there are last, best, averaged; did you mean 'averaged'?" in told(robust_run, weights="averagd")
    file = robust_run / "last.safetensors"
    assert told(file, weights="averaged").startswith(f"{file} is a file; weights='averaged' is for a run's folder")
    shutil.copy(robust_run / "config.yaml", tmp_path)
    assert told(tmp_path) == f"{tmp_path} has no 'last' weights; it has none yet"


def test_weights_alone_need_no_run(tmp_path, robust_run):
    shutil.copy(robust_run / "last.safetensors", tmp_path)
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(bt.load(tmp_path)(x), bt.load(robust_run)(x))
