"""The command `bullettrain`: a user's mistake is one line and exit status 2, without a traceback."""

from __future__ import annotations

import io
import os
import sys

from bullettrain.errors import UserError
from bullettrain.extras import extra


def main() -> None:
    """Run the command line; also behind `python -m bullettrain`."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a terminal without × costs a sign, not the command
    try:
        _run()
    except ImportError as error:
        _stop(str(error))
    except KeyboardInterrupt:
        print("bullettrain: stopped", file=sys.stderr)
        sys.exit(130)


def _run() -> None:
    with extra("the command"):
        from bullettrain.commands import app
    try:
        app(prog_name="bullettrain")
    except UserError as error:
        _stop(str(error))


def _stop(message: str) -> None:
    if "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        print(f"bullettrain: {message}", file=sys.stderr)
    sys.exit(2)
