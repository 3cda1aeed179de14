"""The clock of a run: what is training, and what is compiling and capturing."""

from types import SimpleNamespace

import torch

from bullettrain.training import steps
from bullettrain.training.state import Position
from bullettrain.training.steps import Clock


def test_captures_are_no_training_whether_the_clock_runs_or_stands(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(steps.time, "perf_counter", lambda: now.seconds)
    stepper = SimpleNamespace(capture_seconds=0.0)
    clock, at = Clock(torch.device("cpu"), stepper), Position()

    stepper.capture_seconds += 2.5  # a first mini-batch, before the clock is started
    now.seconds += 2.5
    clock.start()
    stepper.capture_seconds += 4.0
    now.seconds += 5.0
    clock.stop(at)
    assert (at.seconds, at.epoch_seconds, at.capture_seconds) == (1.0, 1.0, 6.5)

    now.seconds += 7.0  # evaluating, saving
    clock.start()
    now.seconds += 2.0
    assert clock.running() == 2.0
    clock.stop(at)
    assert (at.seconds, at.epoch_seconds, at.capture_seconds) == (3.0, 3.0, 6.5)
    clock.stop(at)  # it is stopped already
    assert (at.seconds, at.epoch_seconds, at.capture_seconds) == (3.0, 3.0, 6.5)
