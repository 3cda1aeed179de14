"""What the corruption of a mini-batch starts from: by seed, epoch and place in the joint batch alone."""

from __future__ import annotations

import torch
from torch import Tensor

from bullettrain.allocation import Allocation
from bullettrain.data import Loader
from bullettrain.data.base import derive_seed
from bullettrain.engine import BulletTrain
from bullettrain.objectives import AdversarialObjective, AugMix
from bullettrain.training.config import Config
from bullettrain.training.setup import Place


class Later:
    """A budget that begins later. Until then nobody gets a step, whatever class they are found in."""

    def __init__(self, budget: Allocation) -> None:
        self.budget, self.begun = budget, False

    @property
    def uniform_steps(self) -> int | None:
        """The number of steps that everybody gets, or None where the classes are to differ."""
        same = self.budget.uniform_steps
        return same if self.begun or same is None else 0

    def allocate(self, category: Tensor, svar: Tensor | None = None) -> Tensor:
        """Steps (m,), int64, for categories (m,) and their scores (m,)."""
        steps = self.budget.allocate(category, svar)
        return steps if self.begun else torch.zeros_like(steps)

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """Step sizes (m,), floating, for categories (m,)."""
        return self.budget.step_sizes(category, steps, eps)


class Starts:
    """Starting points of attacks, or the draws that decide views.

    With ``method.ramp`` also how large eps is by then, and with ``method.clean`` whether there are attacks yet.

    Args:
        batches: mini-batches an epoch.
    """

    def __init__(self, config: Config, engine: BulletTrain, loader: Loader, place: Place, batches: int) -> None:
        self.config, self.objective, self.batches = config, engine.objective, batches
        self.loader, self.place = loader, place
        self.later = Later(engine.budget) if config.method.clean else None
        if self.later is not None:
            engine.budget = self.later
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
        part = self.part_of_eps(epoch, index)
        objective.eps = self.config.method.eps * (part or 1.0)
        if self.later is not None:
            self.later.begun = part > 0
        whole = torch.empty_like(x)
        if self.place.together:
            whole = x.new_empty((loader.joint_size(index), *x.shape[1:]))
        noise = objective.noise(whole, self.chance)
        return objective.begin(x, noise[loader.share(index)] if self.place.together else noise)

    def part_of_eps(self, epoch: int, index: int = 0) -> float:
        """How much of its eps the attack has at a mini-batch; 0: there is none yet."""
        method, whole = self.config.method, self.batches * self.config.training.epochs
        done = epoch * self.batches + index + 1 - round(method.clean * whole)
        if done <= 0:
            return 0.0
        steps = method.ramp * whole
        return min(1.0, done / steps) if steps else 1.0
