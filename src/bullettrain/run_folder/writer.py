"""Checkpoints, written while training goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor
from torch.utils._pytree import tree_map_only

from bullettrain.run_folder.folder import Checkpoint, RunFolder


class CheckpointWriter:
    """Writes a run's checkpoints.

    Args:
        folder: of the run.
        background: in a thread of its own, from a copy on the host. A GPU need not wait for the disk then: where an
            epoch takes seconds, that is a good part of it. What goes wrong is raised by the next call.
    """

    def __init__(self, folder: RunFolder, *, background: bool) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._writing: Future[None] | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """What :meth:`RunFolder.save` does; later changes to what is given are not in it."""
        self.wait()
        if self._thread is None:
            self.folder.save(checkpoint)
        else:
            on_host = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), checkpoint)
            self._writing = self._thread.submit(self.folder.save, on_host)

    def wait(self) -> None:
        """Until the last checkpoint is on the disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()  # waits, too
