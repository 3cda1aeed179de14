"""A disk that is full while a run writes: one line, status 2, and every file whole."""

import json
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from command import TINY, command, finished_run
from safetensors import safe_open


@contextmanager
def full_disk(size: int):
    """No file grows beyond ``size`` bytes: a write fails with an OSError, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def check_whole(folder: Path) -> None:
    """Every file that is there can be read to its end, and none that was being written is left."""
    for file in folder.rglob("*"):
        assert not file.name.endswith((".new", ".tmp")), file
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                assert list(opened.keys())
        elif file.suffix == ".pt":
            torch.load(file, weights_only=True)
        elif file.name == "config.yaml":
            assert yaml.safe_load(file.read_text())["recipe"] == "digits"
        elif file.suffix == ".jsonl":
            for line in file.read_text().splitlines()[:-1]:  # a kill may cut the last
                json.loads(line)
        elif file.suffix == ".html":
            assert file.read_text().rstrip().endswith("</html>")


@pytest.mark.parametrize("size", [0, 1_000, 2_000, 50_000, 100_000])
def test_a_run_on_a_full_disk_ends_in_a_line_and_leaves_whole_files(size, tmp_path):
    """Too small for the configuration, the metrics, the weights, the state."""
    folder = tmp_path / "run"
    finished_run()  # everything is imported before
    with full_disk(size):
        ended = command("train", "digits", "--out", str(folder), *TINY)
    assert ended.status == 2, ended
    assert len(ended.err.splitlines()) == 1, ended
    assert "File too large" in ended.err or "could not be written" in ended.err
    check_whole(folder)


def test_an_evaluation_on_a_full_disk_leaves_nothing(tmp_path):
    run = finished_run()
    with full_disk(500):
        ended = command("evaluate", str(run), "--attack", "clean", "--device", "cpu", "--out", str(tmp_path / "e"))
    assert ended.status == 2, ended
    assert len(ended.err.splitlines()) == 1, ended
    assert not list((tmp_path / "e").rglob("*"))
