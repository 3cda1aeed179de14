"""One process at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(path: Path, refusal: Exception) -> Iterator[None]:
    """Hold a file or folder while in here; ``refusal`` is raised where another process holds it.

    The lock goes with the process, however it ends. On Windows there is no such lock, and nothing is refused.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise refusal from None
        yield
    finally:
        os.close(handle)
