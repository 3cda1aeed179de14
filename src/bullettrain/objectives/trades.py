"""TRADES: a clean term, and a robust one that keeps the corrupted prediction near the clean one."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from bullettrain.objectives.base import SMOOTHED, AdversarialObjective, cross_entropy, mean_over, probabilities
from bullettrain.precision import at_least_float32


class TRADES(AdversarialObjective):
    """Zhang et al.: CE(z, y) + β·KL(softmax z ‖ softmax z'), with x' by ascent on the same KL.

    The target of the attack, the clean softmax in eval mode, is computed once. The same logits select.

    Args:
        beta: β = 1/λ, the weight of the robust term; None: 6.0.
        eps: radius of the ball; None: 0.031, in L∞ only.
        norm: "linf", "l2" or :class:`Normalized`.
        bounds: valid range (low, high) of ``x``; "auto": (0, 1), or that of :class:`Normalized`.
        selection, attack_mode, generator, attack, label_smoothing: see :class:`AdversarialObjective`.
    """

    usual_beta = 6.0
    attack_loss = "kl"
    random_start = "normal"
    options = SMOOTHED

    def loss(
        self, z: Tensor | None, z_prime: Tensor, y: Tensor, touched: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """CE(z, y) + β·KL(softmax z ‖ softmax z'); the target of the KL is not detached."""
        assert z is not None
        z, z_prime = at_least_float32(z), at_least_float32(z_prime)
        clean, corrupted = (z, z_prime) if touched is None else (z[touched], z_prime[touched])
        kl = F.kl_div(F.log_softmax(corrupted, dim=1), probabilities(clean), reduction="none").sum(dim=1)
        clean_loss = cross_entropy(z, y, weight, self.label_smoothing)
        return clean_loss + self.beta * mean_over(kl, len(y), weight, touched)
