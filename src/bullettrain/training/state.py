"""What a run goes on from as if it had never stopped: its checkpoint, made and put back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from bullettrain.brief import first_line
from bullettrain.run_folder import Checkpoint, Metadata, RunError, Weights, environment
from bullettrain.training.metrics import Sums
from bullettrain.training.optimizer import load_optimizer

if TYPE_CHECKING:
    from bullettrain.training.trainer import Trainer

MACHINE = ("machine", "device", "torch", "bullettrain", "commit")
"""Where one of these is another when a run goes on, a record says so."""


@dataclass
class Position:
    """How far the run has come."""

    step: int = 0
    epoch: int = 0
    """Counts from 0."""
    index: int = 0
    """Mini-batch within the epoch that comes next."""
    seconds: float = 0.0
    """Spent training, evaluations not counted."""
    epoch_seconds: float = 0.0
    capture_seconds: float = 0.0
    """Spent on compilation and captures, not counted as training."""
    best: float = -1.0
    """Highest validation PGD-10 accuracy so far."""
    best_clean: float = -1.0
    """Clean validation accuracy of those weights."""
    low_probe: bool = False
    """Whether the probe of the last epoch was suspiciously low, see :func:`bullettrain.training.collapse.low_probe`."""


def about(trainer: Trainer) -> Metadata:
    """What is written into every weights file: enough to build the network again."""
    at, config, classes = trainer.at, trainer.config, tuple(trainer.train_set.classes)
    return Metadata(at.step, at.epoch, trainer.described, classes, config.recipe, config.method.threat)


def weights(trainer: Trainer) -> dict[str, Weights]:
    """Those that are kept, by name."""
    found = {"last": Weights(trainer.network.state_dict(), about(trainer))}
    if trainer.best is not None:
        found["best"] = trainer.best
    if trainer.average is not None:
        found["averaged"] = Weights(trainer.average.module.state_dict(), about(trainer))
    return found


def networks(trainer: Trainer) -> Iterator[tuple[str, nn.Module]]:
    """A network for each of the weights, by their name."""
    for name, kept in weights(trainer).items():
        network = copy.deepcopy(trainer.network)
        network.load_state_dict(kept.tensors)
        yield name, network


def checkpoint(trainer: Trainer) -> Checkpoint:
    """All that the next step depends on."""
    device = trainer.place.device
    state = {
        "position": asdict(trainer.at),
        "optimizer": trainer.optimizer.state_dict(),
        "engine": trainer.engine.state_dict(),
        "initial": trainer.initial.state_dict(),
        "average_updates": None if trainer.average is None else trainer.average.n_averaged,
        "first_layer_share": getattr(_ascent(trainer), "share", None),
        "metrics": trainer.metrics.peek().values,
        "epoch_sums": trainer.epoch_sums.values,
        "run_sums": trainer.run_sums.values,
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "metrics_size": trainer.folder.metrics_size(),
        "data": trainer.fingerprint,
    }
    return Checkpoint(weights(trainer), state)


def restore(trainer: Trainer, kept: Checkpoint) -> None:
    """Put a trainer where the checkpoint was written.

    Raises:
        RunError: the two do not fit.
    """
    state, device = kept.state, trainer.place.device
    try:
        if state["data"] != trainer.fingerprint:
            raise RunError(f"{trainer.folder.path} cannot be resumed: its data has changed since")
        trainer.network.load_state_dict(kept.weights["last"].tensors)
        trainer.best = kept.weights.get("best")
        load_optimizer(trainer.optimizer, state["optimizer"])
        trainer.engine.load_state_dict(state["engine"])
        trainer.initial.load_state_dict(state.get("initial", {}))
        if trainer.average is not None:
            trainer.average.module.load_state_dict(kept.weights["averaged"].tensors)
            trainer.average.n_averaged.copy_(state["average_updates"])
        if state["first_layer_share"] is not None:
            _ascent(trainer).share = state["first_layer_share"]  # type: ignore[attr-defined]
        trainer.stepper.loaded()
        trainer.at = Position(**state["position"])
        if trainer.place.first:  # sums over processes: one of them goes on with what there was
            trainer.metrics.restore(state["metrics"])
        trainer.epoch_sums, trainer.run_sums = Sums(state["epoch_sums"]), Sums(state["run_sums"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], device)
    except (KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise RunError(
            f"{trainer.folder.path} cannot be resumed, its checkpoint does not fit: {first_line(error)}"
        ) from None


def resume(trainer: Trainer) -> None:
    """Continue from the checkpoint of a trainer's folder.

    Raises:
        RunError: it is damaged, or does not fit.
    """
    folder = trainer.folder
    kept = folder.load()
    restore(trainer, kept)
    trainer.place.wait()  # all have read it
    if not trainer.place.first:
        return
    folder.cut_metrics(kept.state["metrics_size"])
    folder.export(kept)
    moves = [record for record in folder.records() if record.get("kind") == "machine"]
    before, now = (moves or [folder.environment()])[-1], environment(trainer.place.device)
    if any(str(before.get(key)) != str(now[key]) for key in MACHINE):
        folder.log({"kind": "machine", "step": trainer.at.step, **{key: now[key] for key in MACHINE}})


def _ascent(trainer: Trainer) -> object:
    """The step of the attack; YOPO's counts what the first layer costs when it first sees the network."""
    return getattr(getattr(trainer.engine.objective, "attack", None), "ascent", None)
