"""The command `bullettrain`, and the one boundary around it: whatever goes wrong is one line and an exit status.

Status 2 is for what the user can change: what was asked for, a path, a full disk. Status 1 is for everything else,
with the traceback in a file. Ctrl-C is 130.
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

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that need no path to be understood."""


def main() -> None:
    """Run the command line; also behind `python -m bullettrain`."""
    debug = "--debug" in sys.argv[1:]
    sys.argv[1:] = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        status = _run()
    except BaseException as error:
        message, status = _explain(error)
        with contextlib.suppress(OSError):  # nobody listens
            if debug:
                traceback.print_exc()
            if message:
                print(f"bullettrain: {message}", file=sys.stderr)
    _leave_group()
    sys.exit(status)


def _run() -> int:
    """The command's exit status, once all that it printed is written."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # a terminal without × costs a sign, not the command
    with extra("the command"):
        from bullettrain.cli.app import app
    try:
        status = app(prog_name="bullettrain", standalone_mode=False)
        if status == 130:  # what the parser makes of Ctrl-C
            raise KeyboardInterrupt
    except SystemExit as stop:
        status = stop.code
    try:
        sys.stdout.flush()
    except OSError:  # what is left has nowhere to go; at exit it would be tried once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
    return status if isinstance(status, int) else 0


def _explain(error: BaseException) -> tuple[str, int]:
    """The line that says what went wrong, and the exit status."""
    if isinstance(error, KeyboardInterrupt) or _interrupts(error):
        return "stopped", 130
    if isinstance(error, UserError):  # of several processes, one speaks
        first = "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"
        return str(error) if first else "", 2
    if hasattr(error, "format_message"):  # the words of the command line do not fit
        return _usage(error), 2
    if isinstance(error, OSError) and (error.filename or error.errno in FULL):
        return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror}", 2
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU's memory is full; choose a smaller batch size", 2
    what = traceback.format_exception_only(error)[-1].splitlines()[0]
    return f"unexpected {what}; {_keep_traceback(error)}", 1


def _interrupts(error: BaseException) -> bool:
    """Whether Ctrl-C is behind it: some imports turn that into another error."""
    cause = error.__cause__ or error.__context__
    return isinstance(error, ImportError | SystemError) and isinstance(cause, KeyboardInterrupt)


def _usage(error: BaseException) -> str:
    """What the parser says, and where all options are shown; without any words, the help itself."""
    text = error.format_message()  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    command = getattr(getattr(error, "ctx", None), "command_path", "bullettrain")
    return f"{' '.join(text.split()).rstrip('.')}; `{command} --help` shows what there is"


def _keep_traceback(error: BaseException) -> str:
    """Write it to a file, and say where that is and what to do with it."""
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
    """Under torchrun, leave the other processes: what still holds the group is collected first, or gloo may abort."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        gc.collect()
        with contextlib.suppress(Exception):
            distributed.destroy_process_group()
