"""A run that another process goes on with: where it goes on, and what it said before, is told."""

import html

import pytest
import torch
from typer.testing import CliRunner

import bullettrain as bt
from bullettrain.cli.app import app
from bullettrain.config import recipe
from bullettrain.processes import Place
from bullettrain.reporting import write_report
from bullettrain.reporting.run import Run
from bullettrain.run_folder import RunFolder
from bullettrain.training import run as runs
from bullettrain.training.recorder import Recorder

CPU = Place(torch.device("cpu"))
OFF = "CUDA graphs are off, steps run one by one: there is no CUDA device"
LATE = "updates are not compiled"
SETTINGS = ["epochs=2", "data.train_size=200", "data.test_size=50", "data.validation=0", "training.batch_size=50"]
SETTINGS += ["probe=0", "evaluation.steps=1", "log_every=2", "engine=graphs"]
SMALL = recipe("digits").with_settings(SETTINGS)


class KilledError(Exception):
    pass


def test_a_kind_of_warning_is_recorded_once_also_by_a_resumed_run(tmp_path):
    for _ in range(2):
        recorder = Recorder(RunFolder(tmp_path))
        recorder.begin()
        recorder.warn("catastrophic overfitting: all but 1 %", 3)
    assert len(RunFolder(tmp_path).records()) == 1


def notes(folder):
    return [record["message"] for record in RunFolder(folder).records() if record["kind"] == "note"]


def shown(folder):
    return html.unescape((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run that said something at its second step and was stopped at its sixth, in the second epoch."""
    trainers, step, taken = [], bt.BulletTrain.updates, []

    class Kept(runs.Trainer):
        def run(self):
            trainers.append(self)
            return super().run()

    def counted(*args, **kwargs):
        taken.append(1)
        if len(taken) == 3:  # the first is a trial
            trainers[-1].recorder.notes.append(LATE)
        if len(taken) == 7:
            raise KilledError
        return step(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "Trainer", Kept)
        patch.setattr(bt.BulletTrain, "updates", counted)
        with pytest.raises(KilledError):
            runs.train(SMALL, tmp_path / "runs" / "digits", CPU)
    return tmp_path / "runs" / "digits"


def test_notes_outlive_the_process_that_said_them(stopped):
    assert notes(stopped) == [OFF, LATE]
    assert runs.train(SMALL, stopped, CPU, resume=True).finished
    assert notes(stopped) == [OFF, LATE], "each once"
    assert Run.read(stopped).notes == [OFF, LATE]
    write_report(stopped)
    assert shown(stopped).count(OFF) == shown(stopped).count(LATE) == 1


def test_a_run_that_had_everything_has_no_notes(robust_run):
    assert notes(robust_run) == []
    assert Run.read(robust_run).notes == []


def test_resume_says_which_folder_it_takes(stopped, monkeypatch):
    monkeypatch.chdir(stopped.parent.parent)
    words = ["train", "--device", "cpu", "--resume", *(word for setting in SETTINGS for word in ("--set", setting))]
    done = CliRunner(env={"COLUMNS": "120"}).invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[:2] == [OFF, "runs/digits: digits on cpu, from step 4"]
    assert done.output.splitlines()[3].strip().startswith("2/2")
