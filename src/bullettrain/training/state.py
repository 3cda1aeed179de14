"""Checkpoints of a run: what they hold, and how training resumes from them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from bullettrain.errors import raised_as
from bullettrain.run_folder import Checkpoint, Metadata, RunError, Weights, environment
from bullettrain.training.metrics import Sums
from bullettrain.training.optimizer import load_optimizer

if TYPE_CHECKING:
    from bullettrain.training.trainer import Trainer

MACHINE = ("machine", "device", "torch", "bullettrain", "commit")
"""A record is written if one of these differs when a run is resumed."""


@dataclass
class Position:
    """Training progress, saved in checkpoints."""

    step: int = 0
    epoch: int = 0
    """Counts from 0."""
    index: int = 0
    """Next mini-batch of the epoch."""
    seconds: float = 0.0
    """Training time, without evaluations."""
    epoch_seconds: float = 0.0
    capture_seconds: float = 0.0
    """Time of compilation and captures, not part of the training time."""
    best: float = -1.0
    """Highest validation PGD-10 accuracy so far."""
    best_clean: float = -1.0
    """Clean validation accuracy of those weights."""
    low_probe: bool = False
    """Whether the probe of the last epoch was suspiciously low, see :func:`bullettrain.training.collapse.low_probe`."""


def about(trainer: Trainer) -> Metadata:
    """Return the metadata of a weights file: enough to build the network again."""
    at, config, classes = trainer.at, trainer.config, tuple(trainer.train_set.classes)
    return Metadata(at.step, at.epoch, trainer.described, classes, config.recipe, config.method.threat)


def weights(trainer: Trainer) -> dict[str, Weights]:
    """Return the weights that a run keeps, by name."""
    kept = {"last": Weights(trainer.network.state_dict(), about(trainer))}
    if trainer.best is not None:
        kept["best"] = trainer.best
    if trainer.average is not None:
        kept["averaged"] = Weights(trainer.average.module.state_dict(), about(trainer))
    return kept


def networks(trainer: Trainer) -> Iterator[tuple[str, nn.Module]]:
    """Yield a network for each of the weights, with their name."""
    for name, part in weights(trainer).items():
        network = copy.deepcopy(trainer.network)
        network.load_state_dict(part.tensors)
        yield name, network


def checkpoint(trainer: Trainer) -> Checkpoint:
    """Return a checkpoint: everything that the next step depends on."""
    device = trainer.place.device
    state = {
        "position": asdict(trainer.at),
        "optimizer": trainer.optimizer.state_dict(),
        "engine": trainer.engine.state_dict(),
        "initial": trainer.initial.state_dict(),
        "average_updates": None if trainer.average is None else trainer.average.n_averaged,
        "first_layer_share": getattr(_ascent(trainer), "share", None),
        "metrics": dict(trainer.metrics.peek()),
        "epoch_sums": dict(trainer.epoch_sums),
        "run_sums": dict(trainer.run_sums),
        "wrong_streak": trainer.streak.examples,
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "metrics_size": trainer.folder.metrics_size(),
        "data": trainer.fingerprint,
    }
    return Checkpoint(weights(trainer), state)


def restore(trainer: Trainer, saved: Checkpoint) -> None:
    """Load a checkpoint into a trainer.

    Raises:
        RunError: the checkpoint does not fit.
    """
    state, device = saved.state, trainer.place.device
    misfit = f"{trainer.folder.path} cannot be resumed, its checkpoint does not fit: {{error}}"
    with raised_as(RunError, misfit, KeyError, TypeError, RuntimeError, AttributeError):
        if state["data"] != trainer.fingerprint:
            raise RunError(f"{trainer.folder.path} cannot be resumed: its data has changed since")
        trainer.network.load_state_dict(saved.weights["last"].tensors)
        trainer.best = saved.weights.get("best")
        load_optimizer(trainer.optimizer, state["optimizer"])
        trainer.engine.load_state_dict(state["engine"])
        trainer.initial.load_state_dict(state.get("initial", {}))
        if trainer.average is not None:
            trainer.average.module.load_state_dict(saved.weights["averaged"].tensors)
            trainer.average.n_averaged.copy_(state["average_updates"])
        if state["first_layer_share"] is not None:
            _ascent(trainer).share = state["first_layer_share"]  # type: ignore[attr-defined]
        trainer.stepper.loaded()
        trainer.at = Position(**state["position"])
        if trainer.place.first:  # sums are added over processes, so one of them holds all
            trainer.metrics.restore(state["metrics"])
        trainer.epoch_sums, trainer.run_sums = Sums(state["epoch_sums"]), Sums(state["run_sums"])
        trainer.streak.examples = state.get("wrong_streak", 0.0)
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], device)


def resume(trainer: Trainer) -> None:
    """Load the checkpoint in a trainer's folder, and drop the records after it.

    Raises:
        RunError: the checkpoint is damaged or does not fit.
    """
    folder = trainer.folder
    saved = folder.load()
    restore(trainer, saved)
    trainer.place.wait()  # until all processes have read it
    if not trainer.place.first:
        return
    folder.cut_metrics(saved.state["metrics_size"])
    folder.export(saved)
    machines = [record for record in folder.records() if record.get("kind") == "machine"]
    before, now = (machines or [folder.environment()])[-1], environment(trainer.place.device)
    if any(str(before.get(key)) != str(now[key]) for key in MACHINE):
        folder.log({"kind": "machine", "step": trainer.at.step, **{key: now[key] for key in MACHINE}})


def _ascent(trainer: Trainer) -> object:
    """Return the attack's ascent step; YOPO's measures its first layer's share of the work once, for a network."""
    return getattr(getattr(trainer.engine.objective, "attack", None), "ascent", None)
