"""What is kept besides weights: with them, how to build the network; in the state, how to go on as if never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bullettrain.brief import first_line
from bullettrain.run_folder import Checkpoint, Metadata, NetworkMetadata, RunError
from bullettrain.training.optim import load_optimizer
from bullettrain.training.tally import Counts

if TYPE_CHECKING:
    from bullettrain.training.loop import Trainer


@dataclass
class Position:
    """How far the run has come: all that changes besides weights, optimiser and F_R."""

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


def of(trainer: Trainer) -> Checkpoint:
    """What is written now."""
    averaged = None if trainer.average is None else trainer.average.module.state_dict()
    return Checkpoint(trainer.network.state_dict(), averaged, about(trainer), state_of(trainer))


def about(trainer: Trainer) -> Metadata:
    """What is written into every weights file: enough to build the network again."""
    network = NetworkMetadata(**asdict(trainer.config.network), **asdict(trainer.shape))
    config, classes = trainer.config, tuple(trainer.train_set.classes)
    return Metadata(trainer.at.step, trainer.at.epoch, network, classes, config.recipe, config.method.threat)


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Everything but the weights; only what `torch.load(weights_only=True)` reads."""
    return {
        "step": trainer.at.step,
        "position": asdict(trainer.at),
        "optimizer": trainer.optimizer.state_dict(),
        "engine": trainer.engine.state_dict(),
        "average": None if trainer.average is None else trainer.average.state_dict(),
        "tally": trainer.tally.state_dict(),
        "epoch_counts": trainer.epoch_counts.sums,
        "run_counts": trainer.run_counts.sums,
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(trainer.place.device) if trainer.place.device.type == "cuda" else None,
        "metrics_size": trainer.recorder.size(),
        "data": trainer.fingerprint,
    }


def restore(trainer: Trainer, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Put a trainer where the checkpoint was written; RunError where the two do not fit."""
    try:
        if state["data"] != trainer.fingerprint:
            raise RunError(f"{trainer.folder.path} cannot be resumed: its data has changed since")
        trainer.network.load_state_dict(weights)
        load_optimizer(trainer.optimizer, state["optimizer"])
        trainer.engine.load_state_dict(state["engine"])
        if trainer.average is not None:
            trainer.average.load_state_dict(state["average"])
        trainer.stepper.loaded()
        trainer.at = Position(**state["position"])
        if trainer.place.first:  # sums over processes: one of them goes on with what there was
            trainer.tally.load_state_dict(state["tally"])
        trainer.epoch_counts, trainer.run_counts = Counts(state["epoch_counts"]), Counts(state["run_counts"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and trainer.place.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], trainer.place.device)
        if trainer.place.first:
            trainer.folder.cut_metrics(state["metrics_size"])
    except (KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise RunError(
            f"{trainer.folder.path} cannot be resumed, its checkpoint does not fit: {first_line(error)}"
        ) from None
