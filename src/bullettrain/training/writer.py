"""Checkpoints, written at once or while training goes on."""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch

from bullettrain.run_folder import Checkpoint, RunFolder


class Writer:
    """Writes a run's checkpoints.

    Args:
        folder: of the run.
        aside: in a thread of its own, from a copy on the host. A GPU need not wait for the disk then: where an epoch
            takes seconds, that is a good part of it. What goes wrong is raised by the next call.
    """

    def __init__(self, folder: RunFolder, *, aside: bool) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, "checkpoint") if aside else None
        self._writing: Future[None] | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """What :meth:`RunFolder.save` does; later changes to what is given are not in it."""
        self.wait()
        if self._thread is None:
            self.folder.save(checkpoint)
        else:
            kept = Checkpoint(*(_on_host(part) for part in checkpoint))
            self._writing = self._thread.submit(self.folder.save, kept)

    def wait(self) -> None:
        """Until the last checkpoint is on the disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()  # waits, too


def _on_host(value: Any) -> Any:
    """A copy, with all tensors in host memory."""
    if torch.is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        same = copy.copy(value)  # with what a state_dict says about itself
        same.update({key: _on_host(part) for key, part in value.items()})
        return same
    return [_on_host(part) for part in value] if isinstance(value, list) else value
