"""What the corruption of a mini-batch starts from: by seed, epoch and place in the joint batch alone."""

from __future__ import annotations

import torch
from torch import Tensor

from bullettrain.data import Loader
from bullettrain.data.base import derive_seed
from bullettrain.objectives import AdversarialObjective, AugMix, Objective
from bullettrain.training.config import Config
from bullettrain.training.setup import Place


class Starts:
    """Starting points of attacks, or the draws that decide views; with ``method.ramp`` also how large eps is by then.

    Args:
        batches: mini-batches an epoch.
    """

    def __init__(self, config: Config, objective: Objective, loader: Loader, place: Place, batches: int) -> None:
        self.config, self.objective, self.loader, self.place, self.batches = config, objective, loader, place, batches
        self.chance = torch.Generator(place.device)

    def __call__(self, x: Tensor, epoch: int, index: int) -> Tensor:
        """Of images x (m, …), mini-batch ``index`` of an epoch. The objective has the eps of that moment after it."""
        objective, loader = self.objective, self.loader
        self.chance.manual_seed(derive_seed(self.config.training.seed, epoch, index, "noise"))
        if isinstance(objective, AugMix):
            draws = objective.draw(loader.joint_size(index), self.place.device, self.chance)
            assert draws is not None  # a config's views are made of draws
            return draws[loader.share(index)]
        assert isinstance(objective, AdversarialObjective)
        objective.eps = self.config.method.eps * self.part_of_eps(epoch, index)
        whole = torch.empty_like(x)
        if self.place.together:
            whole = x.new_empty((loader.joint_size(index), *x.shape[1:]))
        noise = objective.noise(whole, self.chance)
        return objective.begin(x, noise[loader.share(index)] if self.place.together else noise)

    def part_of_eps(self, epoch: int, index: int = 0) -> float:
        """How much of its eps the attack has at a mini-batch."""
        steps = self.config.method.ramp * self.batches * self.config.training.epochs
        return min(1.0, (epoch * self.batches + index + 1) / steps) if steps else 1.0
