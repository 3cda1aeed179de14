"""Optimiser, learning rate and moving average. The rate is a function of the step: resuming needs no scheduler."""

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

if TYPE_CHECKING:
    from bullettrain.training.trainer import Trainer

STATISTICS_EXAMPLES = 4096
"""Training examples that batch-norm statistics of averaged weights are taken of."""


def make_optimizer(model: nn.Module, config: OptimizerConfig, *, capturable: bool = False) -> torch.optim.Optimizer:
    """SGD, Adam or AdamW; norms and biases (every parameter of one dimension or none) without decay if so configured.

    ``capturable``: one that CUDA graphs can hold, with its rate in a tensor.
    """
    learning = [p for p in model.parameters() if p.requires_grad]
    if config.decay_norms or not config.weight_decay:
        groups = [{"params": learning, "weight_decay": config.weight_decay}]
    else:
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
    """Continue from a saved state, which may be another device's: how steps are carried out stays as it is here."""
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, before, strict=True):
        group.update({key: own[key] for key in ("capturable", "fused", "foreach") if key in own})
        device = group["params"][0].device
        rate = float(group["lr"])
        group["lr"] = torch.tensor(rate, device=device) if torch.is_tensor(own["lr"]) else rate
        for parameter in group["params"]:  # Adam counts its steps on the device only where they are captured
            step = optimizer.state.get(parameter, {}).get("step")
            if torch.is_tensor(step):
                optimizer.state[parameter]["step"] = step.to(device if own.get("capturable") else "cpu")


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate; one that lies in a tensor stays where it is."""
    for group in optimizer.param_groups:
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def rate(config: ScheduleConfig, peak: float, step: int, steps_per_epoch: int, epochs: int) -> float:
    """Learning rate of ``step``, counted from 0."""
    total = steps_per_epoch * epochs
    if config.name == "step":
        epoch = step // steps_per_epoch + 1  # milestones count epochs from 1
        return peak * config.factor ** sum(epoch >= milestone for milestone in config.milestones)
    if config.name == "one-cycle":
        turn = config.warmup * total
        if step + 1 <= turn:
            return peak * (step + 1) / turn
        return peak * (total - step) / (total - turn)
    if config.name == "cosine":
        wave = (1 + math.cos(math.pi * step / total)) / 2
        return config.final + (peak - config.final) * wave
    return peak


class MovingAverage(nn.Module):
    """Of weights and statistics; of counts, the network's own.

    A mean of statistics is not that of the mean weights: before these are evaluated, they get their own, within
    :func:`statistics_anew`.

    Update n, counted from 0, keeps min(``decay``, n / (n + 9)) of the average: the first copies the network, and a
    short run's average is not of weights from before it had learned. At 0.999 that ends after 8,991 updates.
    """

    n_averaged: Tensor
    """Updates so far; on the network's device, and saved with the rest."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        super().__init__()
        self.module, self.decay = copy.deepcopy(network).requires_grad_(False), decay
        self.register_buffer("n_averaged", torch.zeros((), dtype=torch.int64, device=next(network.parameters()).device))

    @torch.no_grad()
    def move(self, network: nn.Module) -> None:
        """Take the network as it is now into the average."""
        kept = (self.n_averaged / (self.n_averaged + 9)).clamp(max=self.decay)
        pairs = list(zip(_tensors(self.module), _tensors(network), strict=True))
        for dtype in dict.fromkeys(mean.dtype for mean, _ in pairs):
            means, values = zip(*[pair for pair in pairs if pair[0].dtype == dtype], strict=True)
            if dtype.is_floating_point:
                torch._foreach_sub_(means, values)
                torch._foreach_mul_(means, kept.to(dtype))  # of their own type: else it is a kernel a tensor
                torch._foreach_add_(means, values)
            else:
                torch._foreach_copy_(means, values)
        self.n_averaged.add_(1)


def norms(network: nn.Module) -> list[_BatchNorm]:
    """Its batch norms that keep statistics and learn them."""
    found = [module for module in network.modules() if isinstance(module, _BatchNorm) and module.training]
    return [norm for norm in found if norm.running_mean is not None]


@contextmanager
def statistics_anew(network: nn.Module, first: Tensor) -> Iterator[None]:
    """Within, batch norms forget their statistics, and take the plain mean of those of the batches that they see.

    Until they have seen one they have those of ``first``, images (n, …). Counts are put back.
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
    """Give averaged weights batch-norm statistics of their own: of what training steps would show them now.

    They are those of plain training steps of some thousand examples, which change nothing else.

    Returns:
        Whether there are any.
    """
    if trainer.average is None or not norms(trainer.average.module.train()):
        return False
    training, place, epoch, network = trainer.config.training, trainer.place, trainer.at.epoch, trainer.average.module
    engine = trainer.config.method.build(examples=len(trainer.train_set))
    engine.load_state_dict(trainer.engine.state_dict())
    engine.budget, engine.check_every = trainer.engine.budget, 0
    # Each process sees its share, and that of the first counts; a replay shows nothing new.
    distinct = max(2, -(-STATISTICS_EXAMPLES * place.world // training.batch_size))
    shown = range(0, min(trainer.batches, distinct * training.replays), training.replays)
    first, _ = next(iter(trainer.loader.epoch(epoch)))
    dtype = trainer.stepper.fast.dtype
    with (
        trainer.display.evaluating("averaged: statistics", sum(map(trainer.loader.joint_size, shown))) as bar,
        torch.autocast(place.device.type, dtype or torch.bfloat16, enabled=dtype is not None),
        statistics_anew(network, first),
    ):
        for index, (x, y) in enumerate(itertools.islice(trainer.loader.epoch(epoch), shown.stop)):
            if index in shown:
                batch = trainer.batch(x, y, epoch, index)
                engine.step(network, batch.x, batch.y, start=batch.start, index=batch.indices)
                bar(trainer.loader.joint_size(index))
    return True


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]
