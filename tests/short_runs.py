"""What tests of the training command share: a run of a second or two, what it leaves, and processes of its own."""

import multiprocessing
import signal
import socket
from pathlib import Path

import torch

from bullettrain.config import Config, recipe
from bullettrain.processes import Place
from bullettrain.run_folder import RunFolder
from bullettrain.training.steps import Stepper

CPU = Place(torch.device("cpu"))


def small(*settings: str) -> Config:
    """The digits recipe, cut down to a second or two."""
    cuts = ("epochs=3", "data.train_size=300", "data.test_size=100", "data.validation=60", "training.batch_size=50")
    rest = ("training.probe=20", "evaluation.steps=5", "method.boundary=3", "method.robust=1", "average=0.9")
    return recipe("digits").with_settings([*cuts, *rest, "log_every=2", *settings])


def weights_of(folder: Path) -> dict[str, bytes]:
    """The three files, byte for byte."""
    return {name: (folder / f"{name}.safetensors").read_bytes() for name in ("last", "best", "averaged")}


def kinds(folder: Path, kind: str) -> list[dict]:
    """The records of one kind."""
    return [record for record in RunFolder(folder).records() if record["kind"] == kind]


def died(target, *args) -> bool:
    """Call in a process of its own; whether that was killed."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    process.join()
    return process.exitcode == -signal.SIGKILL


def interrupt_at_the_third_group(monkeypatch) -> None:
    """Ctrl-C while a group is trained."""
    calls, original = [0], Stepper.take

    def take(self, *args):
        calls[0] += 1
        if calls[0] == 3:
            signal.raise_signal(signal.SIGINT)
        return original(self, *args)

    monkeypatch.setattr(Stepper, "take", take)


def free_port() -> int:
    """One at which processes can meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
