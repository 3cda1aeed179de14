"""FGSM-PGI: one step from the example's last perturbation, and a loss that keeps both outputs close."""

from __future__ import annotations

import torch
from torch import Tensor

from bullettrain.attacks import NORMS, Attack
from bullettrain.objectives import PGDAT
from bullettrain.objectives.base import mean_over
from bullettrain.precision import at_least_float32


class FGSMPGI(PGDAT):
    """Jia et al. (2022): CE(z', y) + λ·‖z' − z₀‖²₂/K, z₀ the logits of x + start, the example's last perturbation.

    Settings are those of the authors' code: λ = 10 over the K classes, a step of ε, random first starts of ±ε, and
    smoothed labels, 0.6 for the true class, also in the attack. Their code also attacks in training mode, does not move
    perturbations with the crop and the flip, and has a variant with momentum over epochs (FGSM-MEP), which is not
    implemented here. The loop provides ``start``:

        stored = StoredPerturbations(len(dataset), (3, 32, 32), augment)
        stored.draw(8 / 255)
        for x, y, index, draws in batches:
            out = train.step(model, x, y, start=stored.start(x, index, draws).clamp(0, 1))
            stored.keep(x, out.x_prime, index, draws)

    Args:
        beta: λ; others: see :class:`AdversarialObjective`.
    """

    title = "FGSM-PGI"
    usual_beta = 10.0
    options = ("attack_mode", "generator")
    smoothing = 0.4
    """Probability that is moved from the true class to the others, in equal parts."""
    reset_epochs = 40  # as in the authors' code
    has_clean_term = uniform_only = carries_perturbations = True
    z_of = "start"
    attack_loss: SmoothedCE  # type: ignore[assignment]

    def set_up(self) -> None:
        """Set attack and loss."""
        if self.norm is not NORMS["linf"]:
            raise ValueError("FGSM-PGI keeps perturbations of L∞; give norm='linf'")
        self.attack, self.attack_loss = Attack(start="bernoulli"), SmoothedCE(self.smoothing)

    def loss(
        self, z: Tensor | None, z_prime: Tensor, y: Tensor, touched: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """Smoothed CE(z', y) + λ·‖z' − z₀‖²₂/K; ``z`` is z₀, and not detached."""
        assert z is not None
        z, z_prime = at_least_float32(z), at_least_float32(z_prime)
        apart = (z_prime - z).square().mean(dim=1)
        return mean_over(self.attack_loss(z_prime, y, None) + self.beta * apart, len(y), weight)


class SmoothedCE:
    """Cross-entropy with labels that give ``smoothing`` of their probability to the other classes, in equal parts."""

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing

    def __call__(self, logits: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
        """Return the loss (n,)."""
        return -(self._soft(logits, labels) * logits.log_softmax(dim=1)).sum(dim=1)

    def gradient(self, logits: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
        """Return the gradient (n, K) of the sum."""
        return logits.softmax(dim=1) - self._soft(logits, labels)

    def _soft(self, logits: Tensor, labels: Tensor) -> Tensor:
        classes = torch.arange(logits.shape[1], device=logits.device)
        rest = self.smoothing / (len(classes) - 1)
        return rest + (1 - self.smoothing - rest) * (labels[:, None] == classes).to(logits.dtype)
