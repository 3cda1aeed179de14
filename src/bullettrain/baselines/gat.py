"""GAT: one guided step, and a loss that keeps clean and attacked predictions together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bullettrain.attacks import Attack, AttackLoss
from bullettrain.attacks.losses import ce, ce_gradient
from bullettrain.objectives import AdversarialObjective
from bullettrain.objectives.base import cross_entropy
from bullettrain.precision import accumulation_dtype, at_least_float32

BERNOULLI = Attack(start="bernoulli", radius=0.5)
"""Sriramanan et al.: start at x ± ε/2, with random signs for each pixel."""


class GAT(AdversarialObjective):
    """Sriramanan et al. (2020): CE(z, y) + λ·‖softmax z' − softmax z‖²₂, with x' by ascent on CE(z', y) plus that term.

    As in the authors' code the noise is ±ε/2, the step is ε, every other attack ascends the cross-entropy alone, and λ
    is 10, and four times that in the last 14 of 100 epochs. Your own loop has to report its progress, else λ stays:

        train.objective.progress(step / steps)

    Their attack moves away from the clean prediction in training mode, this one from that in eval mode.

    Args:
        beta: λ; others: see :class:`AdversarialObjective`.
    """

    usual_beta = 10.0
    needs_target = True
    options = ("attack_mode", "generator")

    def set_up(self) -> None:
        """Set the attack and λ."""
        self.attack = BERNOULLI
        self.weights = torch.tensor([self.beta, 1.0], dtype=torch.float64)
        """Current λ, and whether the current attack has the term; changed in place, where captured graphs read it."""

    # ----------------------------------------------------------------------------------- overridden by NuAT

    def growth(self, done: float) -> float:
        """Return the factor of λ after this part of the training."""
        return 4.0 if done >= 0.86 else 1.0

    def distance(self, z_prime: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Return the distance of the predictions from the target, summed over the examples, weighted."""
        gap = (z_prime.softmax(dim=1) - target).square().sum(dim=1)
        return gap.sum() if weight is None else (weight * gap).sum()

    def distance_gradient(self, z_prime: Tensor, target: Tensor) -> Tensor:
        """Return the gradient (n, K) of :meth:`distance` at z'."""
        p = z_prime.softmax(dim=1)
        pull = 2 * p * (p - target)
        return pull - p * pull.sum(dim=1, keepdim=True)

    # ------------------------------------------------------------------------------------------- the method

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
        """Return the starting points, and switch the term of the attack on or off."""
        self._on(x.device)[1].neg_().add_(1)
        return super().begin(x, start)

    @property
    def _attack_loss(self) -> AttackLoss:
        return _Guided(self)

    def progress(self, done: float) -> None:
        """Set λ."""
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
    """Loss of the attack: the cross-entropy and, every other time, λ times the distance of the predictions."""

    def __init__(self, objective: GAT) -> None:
        self.objective = objective

    def __call__(self, logits: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
        """Return the loss (n,), with an equal part of the batch's term for each example."""
        assert target is not None
        weights = self.objective.weights
        term = self.objective.distance(logits, target, None) / len(labels)
        return ce(logits, labels, None) + weights[0] * weights[1] * term

    def gradient(self, logits: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
        """Return the gradient (n, K) of the sum."""
        assert target is not None
        weights = self.objective.weights
        term = self.objective.distance_gradient(logits, target)
        return ce_gradient(logits, labels, None) + weights[0] * weights[1] * term
