"""The processes of a run: where they run, and how they are stopped."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bullettrain.config.settings import ConfigError


@dataclass(frozen=True)
class Place:
    """Where this process runs: its device, its rank, and how many there are."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    @property
    def together(self) -> bool:
        """Whether there are others."""
        return self.world > 1

    def wait(self) -> None:
        """Until all processes are here."""
        if self.together:
            dist.barrier()

    def equalize(self, tensors: Iterable[Tensor]) -> None:
        """Give every process the values of the first."""
        if self.together:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def largest(self, number: int) -> int:
        """Of the numbers that the processes have."""
        if not self.together:
            return number
        shared = torch.tensor([number], device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return int(shared)


def find_place(device: str | None) -> Place:
    """The device that is asked for, or the best there is; under torchrun also the group of processes."""
    world = _process_number("WORLD_SIZE", "1")
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
        if found.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device cuda was asked for, but this machine has no CUDA device; use --device cpu")
        float(torch.ones(1, device=found))
    except (RuntimeError, NotImplementedError, AssertionError):
        raise ConfigError(f"there is no device {name!r}; write cpu, cuda or cuda:1") from None
    if found.type == "cuda" and found.index is not None:
        torch.cuda.set_device(found)  # captures are of the current device
    if world == 1:
        return Place(found)
    if "RANK" not in os.environ or "LOCAL_RANK" not in os.environ:
        raise ConfigError("WORLD_SIZE is set, but RANK is not; start several processes with torchrun")
    _process_number("RANK", "0")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", _process_number("LOCAL_RANK", "0"))
        torch.cuda.set_device(found)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if found.type == "cuda" else "gloo", timeout=timedelta(hours=1))
    if dist.get_rank():
        logging.getLogger("bullettrain").setLevel(logging.CRITICAL)  # of several processes one speaks
    return Place(found, dist.get_rank(), world)


def _process_number(variable: str, usual: str) -> int:
    """What torchrun says of this process in the environment."""
    text = os.environ.get(variable, usual)
    if not text.isdecimal():
        raise ConfigError(f"{variable} is {text!r}; it has to be a whole number, as torchrun sets it, or not set")
    return int(text)


def leave_group() -> None:
    """Leave the other processes, if there are any, once all of them are done.

    What still holds the group (a wrapped network, in a cycle of references) is collected first: gloo's threads must
    end before the interpreter does, or it aborts now and then.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()
    gc.collect()


class StopRequest:
    """Whether SIGINT or SIGTERM asked the run to stop, after the step it is in; a second one stops it at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt  # at once, but with everything closed on the way out
        self.signal = number


class StoppedError(Exception):
    """The run was asked to stop, and stands where it can be saved."""
