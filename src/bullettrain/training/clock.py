"""The clock of a run: it runs while steps are taken, and leaves compilation and captures out."""

from __future__ import annotations

import time

import torch

from bullettrain.training.checkpoint import Position
from bullettrain.training.steppers import Stepper


class Clock:
    """Seconds of training; it stands while a run evaluates and saves."""

    def __init__(self, device: torch.device, stepper: Stepper) -> None:
        self.device, self.stepper = device, stepper
        self._began: float | None = None
        self._captured_before, self._counted = 0.0, 0.0

    def start(self) -> None:
        """Count from now."""
        self._began, self._captured_before = time.perf_counter(), self.stepper.capture_seconds

    def running(self) -> float:
        """Seconds since it was started, captures among them; the device may still be at work."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def stop(self, at: Position) -> None:
        """Wait for the device, and add the time since the start to the run's and the epoch's."""
        if self._began is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        captured = self.stepper.capture_seconds
        spent = self.running() - (captured - self._captured_before)
        at.capture_seconds += captured - self._counted  # also what was spent while the clock stood
        self._began, self._counted = None, captured
        at.seconds += spent
        at.epoch_seconds += spent
