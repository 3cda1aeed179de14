"""Processes of a run: devices, ranks and signals."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bullettrain.config.settings import ConfigError
from bullettrain.errors import raised_as


@dataclass(frozen=True)
class Place:
    """Device and rank of this process, and the number of processes."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.rank == 0

    @property
    def together(self) -> bool:
        """Whether there are several processes."""
        return self.world > 1

    def wait(self) -> None:
        """Wait for all processes."""
        if self.together:
            dist.barrier()

    def equalize(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of rank 0 to every process, in place."""
        if self.together:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def largest(self, number: int) -> int:
        """Return the maximum of ``number`` over all processes."""
        if not self.together:
            return number
        shared = torch.tensor([number], device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return int(shared)


TORCHRUN = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets besides WORLD_SIZE."""


def find_place(device: str | None) -> Place:
    """Return the device, by default CUDA if available, and under torchrun join the process group.

    Raises:
        ConfigError: there is no such device, or torchrun's variables are incomplete.
    """
    world = _process_number("WORLD_SIZE", "1")
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    unknown = f"there is no device {name!r}; write cpu, cuda or cuda:1"
    with raised_as(ConfigError, unknown, RuntimeError, NotImplementedError, AssertionError):
        chosen = torch.device(name)
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device cuda was asked for, but this machine has no CUDA device; use --device cpu")
        float(torch.ones(1, device=chosen))
    if chosen.type == "cuda" and chosen.index is not None:
        torch.cuda.set_device(chosen)  # graphs are captured on the current device
    if world == 1:
        return Place(chosen)
    if missing := [name for name in TORCHRUN if name not in os.environ]:
        raise ConfigError(f"WORLD_SIZE is set, but {missing[0]} is not; start several processes with torchrun")
    _process_number("RANK", "0")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", _process_number("LOCAL_RANK", "0"))
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=timedelta(hours=1))
    if dist.get_rank():
        logging.getLogger("bullettrain").setLevel(logging.CRITICAL)  # only rank 0 logs
    return Place(chosen, dist.get_rank(), world)


def _process_number(variable: str, default: str) -> int:
    """Read one of torchrun's environment variables."""
    text = os.environ.get(variable, default)
    if not text.isdecimal():
        raise ConfigError(f"{variable} is {text!r}; it has to be a whole number, as torchrun sets it, or not set")
    return int(text)


def leave_group() -> None:
    """Wait for the other processes and leave the process group, if there is one.

    Garbage that refers to the group is collected first: if gloo's threads outlive the interpreter, it may abort.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()
    gc.collect()


class StopRequest:
    """Context in which SIGINT and SIGTERM are requests to stop; a second signal raises KeyboardInterrupt.

    Args:
        told: called by the handler of the first signal, between any two instructions of the program.
    """

    def __init__(self, told: Callable[[], None] | None = None) -> None:
        self.told = told
        self.signal: int | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        if self.told is not None:
            self.told()


class StoppedError(Exception):
    """The run was asked to stop. Its state can be saved."""
