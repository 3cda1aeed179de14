"""GAT: one guided step, and a loss that holds the two predictions of an example together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from bullettrain.allocation import StepBudget
from bullettrain.attacks import Attack, AttackLoss, Norm
from bullettrain.attacks.losses import ce, ce_gradient
from bullettrain.attacks.norms import AUTO, Bounds
from bullettrain.attacks.state import Mode
from bullettrain.objectives import AdversarialObjective
from bullettrain.objectives.base import cross_entropy
from bullettrain.precision import accumulation_dtype, at_least_float32
from bullettrain.step import BulletTrain

BERNOULLI = Attack(start="bernoulli", radius=0.5)
"""Sriramanan et al.: from x with half of ε added to, or taken from, each pixel by chance."""


class GAT(AdversarialObjective):
    """Sriramanan et al. (2020): CE(z, y) + λ·‖softmax z' − softmax z‖²₂, with x' by ascent on CE(z', y) plus that term.

    As in the authors' code the noise is ±ε/2, the step ε, and every other attack ascends the cross-entropy alone; λ is
    10, and four times that in the last 14 of 100 epochs. A loop of one's own says how far it is, else λ stays:

        train.objective.progress(step / steps)

    Theirs moves away from the clean prediction in training mode, this one from that in eval mode, in which both attack.

    Args:
        beta: λ; others: see :class:`AdversarialObjective`.
    """

    usual_beta = 10.0
    needs_target = True

    def __init__(
        self,
        *,
        beta: float | None = None,
        eps: float = 8 / 255,
        norm: str | Norm = "linf",
        bounds: Bounds | Literal["auto"] | None = AUTO,
        attack_mode: Mode = "eval",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(
            beta=beta,
            eps=eps,
            norm=norm,
            bounds=bounds,
            attack_mode=attack_mode,
            generator=generator,
            attack=BERNOULLI,
        )
        self.weights = torch.tensor([self.beta, 1.0], dtype=torch.float64)
        """λ by now, and whether the attack of now has the term: changed in place, so that a captured graph sees it."""

    # --------------------------------------------------------------------------------------- what differs in NuAT

    def growth(self, done: float) -> float:
        """What λ is multiplied by when this part of the training is done."""
        return 4.0 if done >= 0.86 else 1.0

    def distance(self, z_prime: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """How far predictions are from the clean ones' target, summed over the examples, each by its weight."""
        gap = (z_prime.softmax(dim=1) - target).square().sum(dim=1)
        return gap.sum() if weight is None else (weight * gap).sum()

    def distance_gradient(self, z_prime: Tensor, target: Tensor) -> Tensor:
        """The gradient (n, K) of :meth:`distance` at z'."""
        p = z_prime.softmax(dim=1)
        pull = 2 * p * (p - target)
        return pull - p * pull.sum(dim=1, keepdim=True)

    # ------------------------------------------------------------------------------------------------ the method

    def loss(
        self, z: Tensor | None, z_prime: Tensor, y: Tensor, touched: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """CE(z, y) + λ·‖softmax z' − softmax z‖²₂; neither prediction is detached."""
        assert z is not None
        z, z_prime = at_least_float32(z), at_least_float32(z_prime)
        clean = cross_entropy(z, y, weight)
        if touched is not None:
            z, z_prime, weight = z[touched], z_prime[touched], None if weight is None else weight[touched]
        return clean + self.weights[0].to(z.dtype) * self.distance(z_prime, self.target_of(z), weight) / len(y)

    def begin(self, x: Tensor, start: Tensor | None) -> Tensor:
        """Where the attack starts. It has the term where that of the mini-batch before had none."""
        self._on(x.device)[1].neg_().add_(1)
        return super().begin(x, start)

    @property
    def _attack_loss(self) -> AttackLoss:
        return _Guided(self)

    def progress(self, done: float) -> None:
        """λ as it is then."""
        self.weights[0] = self.beta * self.growth(done)

    def _on(self, device: torch.device) -> Tensor:
        if self.weights.device != device:
            self.weights = self.weights.to(device, accumulation_dtype(device))
        return self.weights

    def mutable_state(self, x: Tensor) -> list[Tensor]:
        """λ, and whose turn it is."""
        return [self._on(x.device)]

    def state_dict(self) -> dict[str, Any]:
        """λ, and whose turn it is."""
        return {"weights": self.weights.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        if "weights" in state:
            self.weights.copy_(torch.tensor(state["weights"], dtype=torch.float64))


class _Guided:
    """What the attack ascends: the cross-entropy and, every other time, λ times how far apart predictions are."""

    def __init__(self, objective: GAT) -> None:
        self.objective = objective

    def __call__(self, logits: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
        """(n,): each example has an equal part of the term, which is the batch's."""
        assert target is not None
        weights = self.objective.weights
        term = self.objective.distance(logits, target, None) / len(labels)
        return ce(logits, labels, None) + weights[0] * weights[1] * term

    def gradient(self, logits: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
        """Of the sum, (n, K)."""
        assert target is not None
        weights = self.objective.weights
        term = self.objective.distance_gradient(logits, target)
        return ce_gradient(logits, labels, None) + weights[0] * weights[1] * term


def gat_budget() -> StepBudget:
    """One step of ε."""
    return StepBudget.uniform(1, scale=1.0)


def gat(objective: GAT) -> BulletTrain:
    """GAT, or NuAT, with its one step of ε for everyone."""
    if not isinstance(objective, GAT):
        raise TypeError(f"the objective is {type(objective).__name__}; give GAT, e.g. GAT(eps=8/255)")
    return BulletTrain(objective, budget=gat_budget())
