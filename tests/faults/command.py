"""The command in this process: words in, exit status and what was said out."""

import contextlib
import io
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from bullettrain.cli import main

TINY = [
    *("--epochs", "1", "--batch-size", "20", "--device", "cpu", "--set", "data.train_size=60", "--set"),
    *("data.test_size=20", "--set", "data.validation=20", "--set", "probe=0", "--set", "evaluation.steps=1"),
    *("--set", "method.boundary=2", "--set", "method.robust=1"),
]
"""Options that cut the digits recipe down to a second."""


class Ended(NamedTuple):
    """How the command ended."""

    status: int
    out: str
    err: str


def command(*words: str) -> Ended:
    """Run ``bullettrain WORDS``; an exception that leaves it, where a user would see a traceback, leaves this too."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["bullettrain", *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return Ended(status, out.getvalue(), err.getvalue())


@cache
def finished_run() -> Path:
    """The folder of a run of a second, evaluated; not to be changed."""
    folder = Path(_FOLDER.name) / "run"
    assert command("train", "digits", "--out", str(folder), *TINY).status == 0
    assert command("evaluate", str(folder), "--attack", "clean,pgd:steps=1", "--device", "cpu").status == 0
    return folder


_FOLDER = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
