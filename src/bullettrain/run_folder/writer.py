"""Writing checkpoints in the background."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor
from torch.utils._pytree import tree_map_only

from bullettrain.run_folder.folder import Checkpoint, RunFolder


class CheckpointWriter:
    """Writes a run's checkpoints.

    Args:
        folder: of the run.
        background: write a copy on the host in a thread, so that a GPU does not wait for the disk. Errors are raised by
            the next call.
    """

    def __init__(self, folder: RunFolder, *, background: bool) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._writing: Future[None] | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Save a checkpoint as it is now, like :meth:`RunFolder.save`."""
        self.wait()
        if self._thread is None:
            self.folder.save(checkpoint)
        else:
            on_host = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), checkpoint)
            self._writing = self._thread.submit(self.folder.save, on_host)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk."""
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
                self._thread.shutdown()  # waits for the thread
