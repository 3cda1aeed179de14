"""Optimiser, learning rate and moving average of the weights."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bullettrain.config.sections import OptimizerConfig, ScheduleConfig
from bullettrain.data.base import derive_seed

if TYPE_CHECKING:
    from bullettrain.training.trainer import Trainer

STATISTICS_EXAMPLES = 4096
"""Training examples from which the batch-norm statistics of averaged weights are computed."""


def make_optimizer(model: nn.Module, config: OptimizerConfig, *, capturable: bool = False) -> torch.optim.Optimizer:
    """Return SGD, Adam or AdamW.

    Args:
        model: its parameters with ``requires_grad`` are optimised.
        config: if ``decay_norms`` is off, parameters with less than two dimensions have no weight decay.
        capturable: CUDA graphs can capture its steps; the learning rate is a tensor.
    """
    learning = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": learning, "weight_decay": config.weight_decay}]
    if config.weight_decay and not config.decay_norms:
        groups = [
            {"params": [p for p in learning if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in learning if p.ndim <= 1], "weight_decay": 0.0},
        ]
    if capturable:
        for group in groups:
            group["lr"] = torch.tensor(config.lr, device=learning[0].device)
    if config.name in ("adam", "adamw"):
        kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
        return kind(groups, lr=config.lr, capturable=capturable)
    return torch.optim.SGD(
        groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=capturable or None
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state that may come from another device; the settings ``fused`` and ``capturable`` stay as they are."""
    groups = []
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        rate = float(saved["lr"])
        lr = torch.full_like(own["lr"], rate) if torch.is_tensor(own["lr"]) else rate
        settings = {key: own[key] for key in ("capturable", "fused", "foreach") if key in own}
        groups.append({**saved, **settings, "lr": lr})
    optimizer.load_state_dict({**state, "param_groups": groups})


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate, in place if it is a tensor."""
    for group in optimizer.param_groups:
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def rate(config: ScheduleConfig, peak: float, step: float, steps_per_epoch: int, epochs: int) -> float:
    """Return the learning rate of ``step``, counted from 0. A function of the step needs no scheduler state.

    In a shorter epoch, steps are spread over ``steps_per_epoch``, so that the learning rate ends where it should.
    """
    total = steps_per_epoch * epochs
    if config.name == "step":
        epoch = step // steps_per_epoch + 1  # milestones count epochs from 1
        return peak * config.factor ** sum(epoch >= milestone for milestone in config.milestones)
    if config.name == "one-cycle":
        turn = config.warmup * total
        if step + 1 <= turn:
            return peak * (step + 1) / turn
        return min(peak, peak * (total - step) / (total - turn))
    if config.name == "cosine":
        wave = (1 + math.cos(math.pi * step / total)) / 2
        return config.final + (peak - config.final) * wave
    return peak


class MovingAverage(nn.Module):
    """Exponential moving average of parameters and floating-point buffers; other buffers are copied.

    Averaged batch-norm statistics do not belong to the averaged weights: before these are evaluated,
    :func:`average_statistics` computes their own.

    Update n, counted from 0, keeps min(``decay``, n / (n + 9)) of the average: the first copies the network, and a
    short run's average contains little of the initial weights. A decay of 0.999 applies from update 8,991 on.
    """

    n_averaged: Tensor
    """Number of updates, on the network's device."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        super().__init__()
        self.module, self.decay = copy.deepcopy(network).requires_grad_(False), decay
        self.register_buffer("n_averaged", torch.zeros((), dtype=torch.int64, device=next(network.parameters()).device))

    @torch.no_grad()
    def move(self, network: nn.Module) -> None:
        """Update the average with the network's current values."""
        kept = (self.n_averaged / (self.n_averaged + 9)).clamp(max=self.decay)
        pairs = list(zip(_tensors(self.module), _tensors(network), strict=True))
        for dtype in dict.fromkeys(mean.dtype for mean, _ in pairs):
            means, values = zip(*[pair for pair in pairs if pair[0].dtype == dtype], strict=True)
            if dtype.is_floating_point:
                torch._foreach_sub_(means, values)
                torch._foreach_mul_(means, kept.to(dtype))  # with the same dtype, or it takes a kernel per tensor
                torch._foreach_add_(means, values)
            else:
                torch._foreach_copy_(means, values)
        self.n_averaged.add_(1)


def norms(network: nn.Module) -> list[_BatchNorm]:
    """Return the batch norms in training mode that have running statistics."""
    batch_norms = [module for module in network.modules() if isinstance(module, _BatchNorm) and module.training]
    return [norm for norm in batch_norms if norm.running_mean is not None]


@contextmanager
def statistics_anew(network: nn.Module, first: Tensor) -> Iterator[None]:
    """Reset batch-norm statistics and, within the context, compute their plain mean over batches.

    Before the first batch they are those of ``first``, images (n, …). On exit, momentum and batch counts are restored.
    """
    learning = norms(network)
    before = [(norm.momentum, norm.num_batches_tracked.clone()) for norm in learning]  # type: ignore[union-attr]
    for norm in learning:
        norm.reset_running_stats()
        norm.momentum = None
    with torch.no_grad():
        network(first)
    for norm in learning:
        norm.num_batches_tracked = torch.zeros_like(norm.num_batches_tracked)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(learning, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


def average_statistics(trainer: Trainer) -> bool:
    """Compute batch-norm statistics for the averaged weights from training steps on some thousand examples.

    Nothing else of the trainer changes.

    Returns:
        Whether there is an average with batch norms.
    """
    if trainer.average is None or not norms(trainer.average.module.train()):
        return False
    training, place, epoch, network = trainer.config.training, trainer.place, trainer.at.epoch, trainer.average.module
    engine = trainer.config.method.build(dataset_size=len(trainer.train_set))
    engine.load_state_dict(trainer.engine.state_dict())
    engine.budget, engine.check_every = trainer.engine.budget, 0
    # Statistics are those of the first process, which sees its share only. Replays add nothing.
    distinct = max(2, -(-STATISTICS_EXAMPLES * place.world // training.batch_size))
    shown = range(0, min(trainer.batches, distinct * training.replays), training.replays)
    first, _ = next(iter(trainer.loader.epoch(epoch)))
    dtype = trainer.stepper.fast.dtype
    with (
        trainer.display.evaluating("batch norms of the average", sum(map(trainer.loader.joint_size, shown))) as bar,
        torch.autocast(place.device.type, dtype or torch.bfloat16, enabled=dtype is not None),
        torch.random.fork_rng([place.device] if place.device.type == "cuda" else []),
        statistics_anew(network, first),
    ):
        torch.manual_seed(derive_seed(training.seed, epoch, "average"))  # a resumed run draws the same
        for index, (x, y) in enumerate(itertools.islice(trainer.loader.epoch(epoch), shown.stop)):
            if index in shown:
                batch = trainer.batch(x, y, epoch, index)
                engine.step(network, batch.x, batch.y, start=batch.start, index=batch.indices)
                bar(trainer.loader.joint_size(index))
    return True


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]
