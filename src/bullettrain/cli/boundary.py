"""Run the command line, and turn every error into one line and an exit status.

Status 2 is for errors that the user can fix: options, paths, a full disk. Status 1 is for all others, with the
traceback in a file. Ctrl-C is 130.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import shlex
import sys
import tempfile
import traceback

import bullettrain
from bullettrain.errors import UserError
from bullettrain.extras import extra

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors without a path."""


def main() -> None:
    """Run the command line."""
    debug = "--debug" in sys.argv[1:]
    sys.argv[1:] = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        status = _run()
    except BaseException as error:
        message, status = _explain(error)
        with contextlib.suppress(OSError):  # stderr is closed
            if debug:
                traceback.print_exc()
            if message:
                print(f"bullettrain: {message}", file=sys.stderr)
    _leave_group()
    sys.exit(status)


def _run() -> int:
    """Run the command, flush its output, and return the exit status."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # a terminal may lack ×
    with extra("the command"):
        from bullettrain.cli.app import app
    try:
        status = app(prog_name="bullettrain", standalone_mode=False)
        if status == 130:  # the status that typer returns for Ctrl-C
            raise KeyboardInterrupt
    except SystemExit as stop:
        status = stop.code
    try:
        sys.stdout.flush()
    except OSError:  # or Python would flush again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
    return status if isinstance(status, int) else 0


def _explain(error: BaseException) -> tuple[str, int]:
    """Return the message for an error, and the exit status."""
    if isinstance(error, KeyboardInterrupt) or _interrupts(error):
        return "stopped", 130
    if isinstance(error, UserError):  # only the first process prints it
        rank = os.environ.get("RANK", "0")
        first = "WORLD_SIZE" not in os.environ or not rank.isdecimal() or int(rank) == 0
        return str(error) if first else "", 2
    if hasattr(error, "format_message"):  # a usage error
        return _usage(error), 2
    if isinstance(error, OSError) and (error.filename or error.errno in DISK_FULL):
        return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror}", 2
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU's memory is full; choose a smaller batch size", 2
    what = traceback.format_exception_only(error)[-1].splitlines()[0]
    return f"unexpected {what}; {_keep_traceback(error)}", 1


def _interrupts(error: BaseException) -> bool:
    """Return whether Ctrl-C caused the error; some imports turn it into another one."""
    cause = error.__cause__ or error.__context__
    return isinstance(error, ImportError | SystemError) and isinstance(cause, KeyboardInterrupt)


def _usage(error: BaseException) -> str:
    """Return the message of a usage error, or "" if help was printed instead."""
    text = error.format_message()  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    command = getattr(getattr(error, "ctx", None), "command_path", "bullettrain")
    return f"{' '.join(text.split()).rstrip('.')}; see `{command} --help`"


def _keep_traceback(error: BaseException) -> str:
    """Write the traceback to a file, and return what to do with it."""
    lines = [shlex.join(["bullettrain", *sys.argv[1:]]), f"bullettrain {bullettrain.__version__}, Python {sys.version}"]
    torch = sys.modules.get("torch")
    lines += [f"torch {getattr(torch, '__version__', '')} on {sys.platform}", *traceback.format_exception(error)]
    try:
        handle, path = tempfile.mkstemp(prefix="bullettrain-", suffix=".txt")
        with open(handle, "w", encoding="utf-8") as file:
            file.write("\n".join(lines))
    except OSError:
        return "please report it with its traceback, which --debug shows"
    return f"please report it with its traceback, {path} (--debug shows it)"


def _leave_group() -> None:
    """Leave the process group under torchrun. Garbage that still refers to it could make gloo abort."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        gc.collect()
        with contextlib.suppress(Exception):
            distributed.destroy_process_group()
