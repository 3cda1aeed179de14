"""Optimiser and learning rate. The rate is a function of the step, so resuming needs no scheduler state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from bullettrain.config.sections import OptimizerConfig, ScheduleConfig


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
