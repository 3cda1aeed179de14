"""Processes: one at a time in a folder, and none without the one that started it."""

from __future__ import annotations

import multiprocessing
import os
import threading
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


def end_with_parent() -> None:
    """In a process of a pool: end when the first process does, however that ends, and do not wait for it for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
