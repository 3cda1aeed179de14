"""The initial perturbation of a mini-batch: by seed, epoch and place in the joint batch alone."""

from __future__ import annotations

import torch
from torch import Tensor

from bullettrain.allocation import Allocated, Allocation
from bullettrain.config.sections import Config
from bullettrain.data import Loader
from bullettrain.data.base import derive_seed
from bullettrain.history import Past
from bullettrain.objectives import AdversarialObjective, AugMix
from bullettrain.processes import Place
from bullettrain.step import BulletTrain


class WarmedUpBudget:
    """A budget whose attacks begin later, or grow: until they begin nobody gets a step.

    Mini-batches that are attacked together have the radius of the last of them.

    Args:
        budget: what it comes to.
        eps: radius of the attacks, when they have grown; None: they do not grow.
        device: of the examples.
    """

    def __init__(self, budget: Allocation, eps: float | None, device: torch.device) -> None:
        self.budget, self.eps, self.begun = budget, eps, False
        self.part = torch.ones((), device=device)
        """How much of their radius the attacks have by now; a tensor, so that a captured graph sees it."""

    @property
    def uniform_steps(self) -> int | None:
        """The number of steps that everybody gets, or None where the classes are to differ."""
        same = self.budget.uniform_steps
        return same if self.begun or same is None else 0

    def allocate(self, category: Tensor, score: Tensor | None = None, past: Past | None = None) -> Allocated:
        """Steps (m,) and, where attacks grow, their sizes and radii, for categories (m,) and their scores (m,)."""
        given = self.budget.allocate(category, score, past)
        steps = given.steps if isinstance(given, Allocated) else given
        if not self.begun:
            return Allocated(torch.zeros_like(steps))
        if self.eps is None:
            return Allocated(steps)
        radius = (self.part * self.eps).expand(len(steps))
        return Allocated(steps, self.budget.step_sizes(category, steps, self.eps) * self.part, radius)

    def step_sizes(self, category: Tensor, steps: Tensor, eps: float) -> Tensor:
        """Step sizes (m,), floating, for categories (m,)."""
        return self.budget.step_sizes(category, steps, eps)


class InitialPerturbation:
    """Starting points of attacks, or the draws that decide views.

    With ``method.eps_warmup`` also how large eps is by then, and with ``clean_warmup`` whether there are attacks yet.

    Args:
        batches: mini-batches an epoch.
    """

    def __init__(self, config: Config, engine: BulletTrain, loader: Loader, place: Place, batches: int) -> None:
        self.config, self.objective, self.batches = config, engine.objective, batches
        self.loader, self.place = loader, place
        method, self.growing = config.method, None
        if method.clean_warmup or method.eps_warmup:
            self.growing = WarmedUpBudget(engine.budget, method.eps if method.eps_warmup else None, place.device)
            engine.budget = self.growing
        self.chance = torch.Generator(place.device)

    def __call__(self, x: Tensor, epoch: int, index: int) -> Tensor:
        """Of images x (m, …), mini-batch ``index`` of an epoch. The budget has the eps of that moment after it."""
        objective, loader = self.objective, self.loader
        self.chance.manual_seed(derive_seed(self.config.training.seed, epoch, index, "noise"))
        if isinstance(objective, AugMix):
            draws = objective.draw(loader.joint_size(index), self.place.device, self.chance)
            assert draws is not None  # a config's views are made of draws
            return draws[loader.share(index)]
        assert isinstance(objective, AdversarialObjective)
        part = self.part_of_eps(epoch, index)
        if self.growing is not None:
            self.growing.begun = part > 0
            self.growing.part.fill_(part or 1.0)
        whole = torch.empty_like(x)
        if self.place.together:
            whole = x.new_empty((loader.joint_size(index), *x.shape[1:]))
        noise = objective.noise(whole, self.chance)
        if part and objective.start in ("uniform", "clipped"):
            noise = noise * part if part < 1 else noise
        return objective.start_from(x, noise[loader.share(index)] if self.place.together else noise)

    def part_of_eps(self, epoch: int, index: int = 0) -> float:
        """How much of its eps the attack has at a mini-batch; 0: there is none yet."""
        method, whole = self.config.method, self.batches * self.config.training.epochs
        done = epoch * self.batches + index + 1 - round(method.clean_warmup * whole)
        if done <= 0:
            return 0.0
        steps = method.eps_warmup * whole
        return min(1.0, done / steps) if steps else 1.0
