"""A run whose folder goes away, or whose TensorBoard log cannot be written, while it trains."""

import errno
import itertools
import json
import shutil
from pathlib import Path

import pytest
from command import TINY, command, finished_run
from test_full_disk import check_whole

from bullettrain.run_folder import RunFolder
from bullettrain.training.evaluator import Evaluator
from bullettrain.training.recorder import EventFile
from bullettrain.training.run import Trainer
from bullettrain.training.steps import Stepper

MOMENTS = {
    "in an epoch": (Stepper, "take"),
    "at a validation": (Evaluator, "validation"),
    "at the last evaluation": (Evaluator, "final"),
    "at the end": (Trainer, "_end"),
}


def everything(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("moved", [True, False], ids=["moved", "deleted"])
def test_a_folder_that_goes_away_ends_the_run_in_a_line(tmp_path, monkeypatch, moment, moved):
    finished_run()  # everything is imported before
    owner, name = MOMENTS[moment]
    original, folder = getattr(owner, name), tmp_path / "runs" / "run"

    def disturbed(*args, **kwargs):
        if folder.exists():
            folder.rename(tmp_path / "moved") if moved else shutil.rmtree(folder)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, disturbed)
        ended = command("train", "digits", "--out", str(folder), *TINY)
    assert ended.status == 2, ended
    assert ended.err == (
        f"bullettrain: {folder} is gone: it was moved or deleted while it trained; if it was moved, go on with: "
        "bullettrain train NEW-PLACE --resume\n"
    )
    assert everything(tmp_path / "runs") == set()
    if moved:
        check_whole(tmp_path / "moved")
        again = command("train", str(tmp_path / "moved"), "--resume", "--device", "cpu")
        assert again.status == 0, again
        assert (tmp_path / "moved" / "report.html").is_file()


@pytest.mark.parametrize("at", [1, 3])
def test_where_tensorboard_cannot_write_the_run_goes_on_without(tmp_path, monkeypatch, at):
    """The disk is full when its file is made, or later."""
    calls, original = itertools.count(1), EventFile.event

    def event(self, **content):
        if next(calls) >= at:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, **content)

    monkeypatch.setattr(EventFile, "event", event)
    ended = command("train", "digits", "--out", str(tmp_path / "run"), *TINY)
    assert (ended.status, ended.err) == (0, "")
    says = "TensorBoard's log ends here, it could not be written: No space left on device"
    assert ended.out.count(f"warning {says}") == 1
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [record["message"] for record in records if record["kind"] == "note"] == [says]


def test_a_tensorboard_folder_that_is_a_file(tmp_path, monkeypatch):
    create = RunFolder.create
    monkeypatch.setattr(
        RunFolder, "create", lambda self, *args: (create(self, *args), (self.path / "tensorboard").touch())
    )
    ended = command("train", "digits", "--out", str(tmp_path / "run"), *TINY)
    assert (ended.status, ended.err) == (0, "")
    assert "warning TensorBoard's log ends here, it could not be written: File exists" in ended.out


def test_tensorboard_reads_what_is_written():
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    found = accumulator(str(finished_run() / "tensorboard"))
    found.Reload()
    records = map(json.loads, (finished_run() / "metrics.jsonl").read_text().splitlines())
    (epoch,) = [record for record in records if record["kind"] == "epoch"]
    (loss,) = found.Scalars("epoch/loss")
    assert (loss.step, loss.value) == (epoch["step"], pytest.approx(epoch["loss"]))
