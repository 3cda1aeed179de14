"""Records of a run: metrics, notes, TensorBoard events, sample images for the report."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bullettrain.mining import Category
from bullettrain.run_folder import RunFolder, Samples
from bullettrain.run_folder.log import IMAGES
from bullettrain.step import StepOutput

logger = logging.getLogger(__name__)

SAMPLES_PER_CATEGORY = 4


class EventFile:
    """A TensorBoard event file, written synchronously: TensorBoard's own writer raises errors in a thread."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"events.out.tfevents.{time.time():010.0f}.{platform.node()}.{os.getpid()}"

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the floating-point values of a record."""
        if not self.path.exists():
            self.path.parent.mkdir(exist_ok=True)
            self.event(file_version="brain.Event:2")
        figures = {key: value for key, value in record.items() if isinstance(value, float)}
        values = [{"tag": f"{record['kind']}/{key}", "simple_value": value} for key, value in figures.items()]
        self.event(step=record["step"], summary={"value": values})

    def event(self, **content: Any) -> None:
        """Append an event."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        with self.path.open("ab") as file:
            RecordWriter(file).write(Event(wall_time=time.time(), **content).SerializeToString())


class Recorder:
    """Writes records to metrics.jsonl and, if it is installed, to TensorBoard, and sample images for the report.

    A note is written once per run, also if the run is resumed.

    Args:
        folder: of the run; None writes nothing.
    """

    def __init__(self, folder: RunFolder | None) -> None:
        self.folder = folder
        self.notes: list[str] = []
        """Features that are not available here, a line each, for example that steps are not captured."""
        self._noted: set[str] = set()
        self._warned: set[str] = set()
        self._board: EventFile | None = None

    def begin(self) -> None:
        """Prepare the records of a new or resumed run, and write the notes so far."""
        if self.folder is not None:
            earlier = [(record.get("kind"), str(record.get("message"))) for record in self.folder.records()]
            self._noted = {text for kind, text in earlier if kind == "note"}
            self._warned = {text.partition(":")[0] for kind, text in earlier if kind == "warning"}
            self._write_notes(self.folder)
            if importlib.util.find_spec("tensorboard") is not None:
                self._board = EventFile(self.folder.path / "tensorboard")

    def note(self, text: str) -> None:
        """Log a note, and write it with the next record."""
        self.notes.append(text)
        logger.info(text)

    def warn(self, text: str, step: int) -> None:
        """Log and record a warning, once per kind, which is the text before the first colon."""
        kind = text.partition(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            self.log({"kind": "warning", "step": step, "message": text})
            logger.warning(text)

    def log(self, record: Mapping[str, Any]) -> None:
        """Write a record; NaN and infinity become null."""
        if self.folder is None:
            return
        self._write_notes(self.folder)
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
        self.folder.log(finite)
        if self._board is not None and record["kind"] in ("step", "epoch"):
            try:
                self._board.write(finite)
            except OSError as error:
                self._board = None
                self.notes.append(f"TensorBoard's log ends here, it could not be written: {error.strerror}")
                logger.warning(self.notes[-1])

    def _write_notes(self, folder: RunFolder) -> None:
        for note in self.notes:
            if note not in self._noted:
                self._noted.add(note)
                folder.log({"kind": "note", "message": note})

    def batch(self, x: Tensor, y: Tensor, out: StepOutput, classes: tuple[str, ...], *, step: int, epoch: int) -> None:
        """Write a mini-batch for the report: scores, steps, categories and some images. Skip it if the loss is NaN."""
        if self.folder is None or not torch.isfinite(out.loss):
            return
        if out.svar is not None:
            figures = {"svar": out.svar.tolist(), "steps": out.steps.tolist(), "category": out.category.tolist()}
            self.log({"kind": "batch", "step": step, "epoch": epoch, **figures})
        self.folder.write("samples.safetensors", _samples(x, y, out, classes).pack())


def _samples(x: Tensor, y: Tensor, out: StepOutput, classes: tuple[str, ...]) -> Samples:
    """Return a few examples of each category before and after the attack, or the first AugMix view."""
    x_prime, z_prime = (out.x_prime, out.z_prime) if out.z_prime.ndim == 2 else (out.x_prime[0], out.z_prime[0])
    rows = torch.cat([(out.category == category).nonzero()[:SAMPLES_PER_CATEGORY, 0] for category in Category])
    rows = rows.to(x.device)
    before = out.z if out.z is not None else z_prime
    images = [(part[rows].float().clamp(0, 1) * 255).round().to(torch.uint8) for part in (x, x_prime)]
    integers = [out.category[rows], y[rows], before[rows].argmax(dim=1), z_prime[rows].argmax(dim=1)]
    arrays = [part.cpu().numpy() for part in (*images, *integers)]
    return Samples(**dict(zip(IMAGES, arrays, strict=True)), classes=list(classes))
