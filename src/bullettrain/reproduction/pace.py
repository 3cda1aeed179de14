"""How fast runs are with the device to themselves, measured after they have shared it."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from bullettrain.data import DataError
from bullettrain.reproduction.records import WHERE, Record
from bullettrain.training.bench import Timed
from bullettrain.training.config import Config
from bullettrain.training.folder import RunFolder, environment
from bullettrain.training.loop import Trainer
from bullettrain.training.settings import ConfigError
from bullettrain.training.setup import find_place, load_data


@dataclass(frozen=True)
class How:
    """How steps are timed.

    Args:
        steps, repeats: mini-batches timed at once, and how often.
        at_once: runs that are compiled and captured at the same time; timed they are one after the other.
        data_dir, device: as for a run.
    """

    steps: int = 40
    repeats: int = 5
    at_once: int = 1
    data_dir: Path | None = None
    device: str | None = None


def is_timed(record: Record, device: torch.device) -> bool:
    """Whether ``record`` has a pace that was measured with this code on this kind of device."""
    there, here = record.pace.get("environment", {}), environment(device)
    return bool(there) and all(there.get(key) == here.get(key) for key in WHERE)


def measure(records: Sequence[Record], how: How, found: Callable[[Record], None]) -> list[str]:
    """Give each of ``records`` its pace, at the shares that its run had on average; what went wrong, a line each.

    Those that are prepared at once are timed in turns, so that a device that slows down does so for all of them. A run
    that nothing was learnt in is as fast as one in which there was: weights are as they are drawn.
    """
    problems: list[str] = []
    for first in range(0, len(records), how.at_once):
        processes = [_Process(record, how) for record in records[first : first + how.at_once]]
        try:
            problems += [problem for process in processes if (problem := process.ready())]
            there = [process for process in processes if process.alive]
            for _ in range(how.repeats):
                for process in there:
                    process.time()
            for process in there:
                process.record.pace = process.end()
                found(process.record)
        finally:
            for process in processes:
                process.stop()
    return problems


class _Process:
    """A run of its own process, in which steps are timed on demand."""

    def __init__(self, record: Record, how: How) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy CUDA and threads
        self.record = record
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, record, how), daemon=True)
        self.process.start()
        theirs.close()
        self.alive = False

    def ready(self) -> str | None:
        """Wait until it can be timed; why it cannot, if so."""
        try:
            problem: str | None = self.pipe.recv()
        except EOFError:
            self.process.join()
            problem = f"its process ended with status {self.process.exitcode}"
        self.alive = problem is None
        return None if problem is None else f"{self.record.name}: {problem}"

    def time(self) -> None:
        """Once more."""
        self.pipe.send(True)
        self.pipe.recv()

    def end(self) -> dict[str, Any]:
        """What was found."""
        self.pipe.send(False)
        pace: dict[str, Any] = self.pipe.recv()
        return pace

    def stop(self) -> None:
        """Let it go."""
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def _serve(pipe: Connection, record: Record, how: How) -> None:
    """In the process: be ready, then time whenever asked."""
    try:
        place, config = find_place(how.device), Config.from_dict(record.config)
        data = load_data(config, how.data_dir)
    except (ConfigError, DataError) as error:
        pipe.send(str(error))
        return
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, RunFolder(Path(folder)), place, data)
        shares = (record.shares["outlier"], record.shares["boundary"], record.shares["robust"])
        timed = Timed(trainer, shares if record.mined else None, how.steps)
        pipe.send(None)
        while pipe.recv():
            timed.time()
            pipe.send(None)
        pipe.send(
            {
                "epoch_seconds": timed.epoch_seconds,
                "step_ms": timed.step_ms,
                "spread_ms": timed.spread_ms,
                "steps": how.steps,
                "repeats": how.repeats,
                "notes": trainer.notes,
                "environment": environment(place.device),
            }
        )
