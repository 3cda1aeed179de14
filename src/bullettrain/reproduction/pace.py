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

from bullettrain.brief import first_line
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
    commits = [str(commit) for commit in (there.get("commit"), here["commit"]) if commit]
    if len(commits) < 2 or any(commit.endswith("-dirty") for commit in commits):
        return False  # what code that was is not known
    same = commits[0].startswith(commits[1]) or commits[1].startswith(commits[0])
    return same and all(there.get(key) == here.get(key) for key in WHERE if key != "commit")


def measure(records: Sequence[Record], how: How, found: Callable[[Record], None]) -> list[str]:
    """Give each of ``records`` its pace, at the shares that its run had on average; what went wrong, a line each.

    Those that are prepared at once are timed in turns, so that a device that slows down does so for all of them. A run
    that nothing was learnt in is as fast as one in which there was: weights are as they are drawn.
    """
    by_oracle = [record for record in records if record.mined and record.config["method"]["separation"] != "quantile"]
    reason = "its classes are not by the rule, and cannot be imposed; run it alone"
    problems = [f"{record.name}: {reason}" for record in by_oracle]
    left = [record for record in records if record not in by_oracle]
    for first in range(0, len(left), how.at_once):
        processes: list[_Process] = []
        try:
            for record in left[first : first + how.at_once]:
                processes.append(_Process(record, how))  # noqa: PERF401 (those begun are stopped if one cannot be)
            for process in processes:
                process.hear()  # it is ready
            for _ in range(how.repeats):
                for process in processes:
                    process.ask(True)
            for process in processes:
                pace = process.ask(False)
                if process.problem is None:
                    process.record.pace = pace
                    found(process.record)
            problems += [f"{process.record.name}: {process.problem}" for process in processes if process.problem]
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
        self.problem: str | None = None
        """Why it cannot be timed; nothing is asked of it then."""

    def ask(self, more: bool) -> dict[str, Any]:
        """Time once more, and wait for that; or, at the end, what was found."""
        try:
            if self.problem is None:
                self.pipe.send(more)
        except OSError:
            pass  # it has ended: the next line says how
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """Its next answer; empty where there is none."""
        if self.problem is not None:
            return {}
        try:
            answer: dict[str, Any] = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            self.problem = f"its process ended with status {self.process.exitcode}"
            return {}
        self.problem = answer.get("problem")
        return answer

    def stop(self) -> None:
        """Let it go."""
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def _serve(pipe: Connection, record: Record, how: How) -> None:
    """In the process: be ready, then time whenever asked."""
    try:
        # Tuned at once: what a long training comes to is what is timed.
        config = Config.from_dict(record.config).replace_section("training", tune_after=0.0)
        place = find_place(how.device)
        data = load_data(config, how.data_dir)
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(config, RunFolder(Path(folder)), place, data)
            shares = (record.shares["outlier"], record.shares["boundary"], record.shares["robust"])
            timed = Timed(trainer, shares if record.mined else None, how.steps)
            pipe.send({})
            while pipe.recv():
                timed.time()
                pipe.send({})
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
    except (ConfigError, DataError, RuntimeError, ValueError) as error:
        pipe.send({"problem": first_line(error)})
