"""Records of a run: metrics.jsonl always, TensorBoard where it is installed, sample images for the report."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from bullettrain.extras import extra
from bullettrain.mining import Category
from bullettrain.run_folder import RunFolder
from bullettrain.step import StepOutput

SAMPLES = 4
"""Images kept of each class."""


class Recorder:
    """Writes records; a process without a folder writes none.

    ``notes`` may grow meanwhile. Each is a record of its own, written once: what a run said before it was stopped is
    not lost when another process goes on with it.
    """

    def __init__(self, folder: RunFolder | None, notes: Sequence[str] = ()) -> None:
        self.folder, self.notes = folder, notes
        self.noted: set[str] = set()
        self.board: Any = None

    def __enter__(self) -> Recorder:
        if self.folder is not None:
            before = (record for record in self.folder.records() if record.get("kind") == "note")
            self.noted = {str(record.get("message")) for record in before}
            self._note(self.folder)
        if self.folder is not None and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.folder.path / "tensorboard"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.board is not None:
            self.board.close()

    def log(self, record: Mapping[str, Any]) -> None:
        """One record; NaN and infinity become null, which JSON has."""
        if self.folder is None:
            return
        self._note(self.folder)
        self.folder.log({key: _json(value) for key, value in record.items()})
        if self.board is not None and record["kind"] in ("step", "epoch"):
            for key, value in record.items():
                if isinstance(value, float) and math.isfinite(value):
                    self.board.add_scalar(f"{record['kind']}/{key}", value, record["step"])

    def _note(self, folder: RunFolder) -> None:
        for note in self.notes:
            if note not in self.noted:
                self.noted.add(note)
                folder.log({"kind": "note", "message": note})

    def batch(self, x: Tensor, y: Tensor, out: StepOutput, classes: tuple[str, ...], *, step: int, epoch: int) -> None:
        """One mini-batch for the report: scores and steps of all of it, and a few of its images.

        Of a network that has learnt NaN there is nothing to show.
        """
        if self.folder is None or not torch.isfinite(out.loss):
            return
        if out.svar is not None:
            figures = {"svar": out.svar.tolist(), "steps": out.steps.tolist(), "category": out.category.tolist()}
            self.log({"kind": "batch", "step": step, "epoch": epoch, **figures})
        _save_samples(self.folder, x, y, out, classes)

    def size(self) -> int:
        """Bytes of metrics so far."""
        return 0 if self.folder is None else self.folder.metrics_size()


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _save_samples(folder: RunFolder, x: Tensor, y: Tensor, out: StepOutput, classes: tuple[str, ...]) -> None:
    """A few examples of each class before and after the attack, for the report; of AugMix's views the first."""
    x_prime, z_prime = (out.x_prime, out.z_prime) if out.z_prime.ndim == 2 else (out.x_prime[0], out.z_prime[0])
    rows = torch.cat([(out.category == category).nonzero()[:SAMPLES, 0] for category in Category])
    rows = rows.to(x.device)
    before = out.z if out.z is not None else z_prime

    def as_bytes(images: Tensor) -> Tensor:
        return (images[rows].float().clamp(0, 1) * 255).round().to(torch.uint8)

    tensors = {
        "clean": as_bytes(x),
        "adversarial": as_bytes(x_prime),
        "category": out.category[rows],
        "label": y[rows],
        "clean_prediction": before[rows].argmax(dim=1),
        "adversarial_prediction": z_prime[rows].argmax(dim=1),
    }
    with extra("a checkpoint"):
        from safetensors.torch import save
    packed = save(
        {key: value.cpu().contiguous() for key, value in tensors.items()},
        metadata={"classes": json.dumps(list(classes))},
    )
    folder.write("samples.safetensors", packed)
