"""The boundary around a command: whatever goes wrong in it is one line and an exit status."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bullettrain
from bullettrain import cli
from bullettrain.errors import UserError

OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})  # as torch has it


def interrupted_import():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise ImportError("numpy.core failed to import") from None


@pytest.fixture
def fails(monkeypatch, capsys):
    """Run a command that raises: its exit status and what it says on stderr."""

    def run(error, *options):
        def app(**_):
            raise error

        monkeypatch.setattr("bullettrain.cli.app.app", app)
        monkeypatch.setattr(sys, "argv", ["bullettrain", "train", *options])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, capsys.readouterr().err

    return run


EXPECTED = {
    "mistake": (UserError("eps is -1; it has to be above 0"), 2, "eps is -1; it has to be above 0"),
    "path": (PermissionError(13, "Permission denied", "/some/x"), 2, "/some/x: Permission denied"),
    "full disk": (OSError(28, "No space left on device"), 2, "No space left on device"),
    "memory": (OutOfMemoryError("CUDA"), 2, "the GPU's memory is full; choose a smaller batch size"),
    "Ctrl-C": (KeyboardInterrupt(), 130, "stopped"),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_what_the_user_can_change_is_one_line(fails, case):
    error, status, said = EXPECTED[case]
    assert fails(error) == (status, f"bullettrain: {said}\n")


def test_anything_else_keeps_its_traceback(fails, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    status, said = fails(ZeroDivisionError("division by zero\nand more"))
    (kept,) = tmp_path.iterdir()
    assert status == 1
    assert said.startswith("bullettrain: unexpected ZeroDivisionError: division by zero; please report it with its ")
    assert said.count("\n") == 1
    assert str(kept) in said
    text = kept.read_text()
    assert text.startswith(f"bullettrain train\nbullettrain {bullettrain.__version__}, Python 3.")
    assert "Traceback" in text
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert fails(ZeroDivisionError())[1].endswith("please report it with its traceback, which --debug shows\n")


@pytest.mark.parametrize(("error", "status"), [(UserError("no"), 2), (ZeroDivisionError("no"), 1)])
def test_debug_shows_the_traceback(fails, error, status):
    code, said = fails(error, "--debug")
    assert code == status
    assert said.startswith("Traceback (most recent call last):")
    assert said.splitlines()[-1].startswith("bullettrain: ")


def test_ctrl_c_that_an_import_turned_into_another_error(fails):
    try:
        interrupted_import()
    except ImportError as error:
        assert fails(error) == (130, "bullettrain: stopped\n")


@pytest.mark.parametrize(("rank", "said"), [("0", "bullettrain: no\n"), ("1", "")])
def test_of_several_processes_one_speaks(fails, monkeypatch, rank, said):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    assert fails(UserError("no")) == (2, said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nothing", "No such command 'nothing'; see `bullettrain --help`"),
        ("evaluate", "Missing argument 'model'; see `bullettrain evaluate --help`"),
        ("train --epoch 3", "No such option: --epoch"),
        ("data nothing", "see `bullettrain data --help`"),
    ],
)
def test_words_that_do_not_fit_are_one_line(monkeypatch, capsys, words, said):
    monkeypatch.setattr(sys, "argv", ["bullettrain", *words.split()])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    found = capsys.readouterr()
    assert (stop.value.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert said in found.err


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two'; it has to be a whole number"),
        ("RANK", "two", "RANK is 'two'; it has to be a whole number"),
        ("MASTER_ADDR", None, "WORLD_SIZE is set, but MASTER_ADDR is not; start several processes with torchrun"),
    ],
)
def test_what_torchrun_would_not_say(monkeypatch, capsys, variable, value, said):
    usual = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, text in {**usual, variable: value}.items():
        monkeypatch.setenv(name, text) if text is not None else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["bullettrain", "train"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"bullettrain: {said}")


COMMAND = f"{sys.executable} -m bullettrain"
STREAMS = {
    "full": (f"{COMMAND} --version > /dev/full", 2, "bullettrain: No space left on device\n"),
    "closed": (f"{COMMAND} --version >&-", 0, ""),
    "closed errors": (f"{COMMAND} nothing 2>&-", 2, ""),
    "pipe": (f"{COMMAND} train --help | true", 0, ""),
    "without typer": (
        f"{sys.executable} -c \"import sys; sys.modules['typer'] = None; from bullettrain.cli import main; main()\"",
        2,
        'bullettrain: the command needs typer: in your clone of bullettrain, pip install ".[app]"\n',
    ),
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("case", STREAMS)
def test_output_that_cannot_be_written(case):
    line, status, said = STREAMS[case]
    done = subprocess.run(line, shell=True, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (status, said)
