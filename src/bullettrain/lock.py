"""File locks between processes, and workers that end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, refusal: Exception) -> Iterator[None]:
    """Lock a file or folder. Raises ``refusal`` if another process has locked it.

    The lock ends with the process. On Windows there is no lock.
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
    """In a worker process: exit when the parent process ends, for whatever reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
