"""MART: treat misclassified examples differently, by a boosted cross-entropy and a weighted KL."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bullettrain.objectives.base import SMOOTHED, AdversarialObjective, cross_entropy, mean_over, probabilities
from bullettrain.precision import at_least_float32


class MART(AdversarialObjective):
    """Wang et al.: BCE(z', y) + β·KL(softmax z ‖ softmax z')·(1 − p_y(z)), with x' by ascent on the cross-entropy.

    BCE = CE(z', y) − log(1 − largest wrong p'). The small constants are those of the authors' code. The training-mode
    logits z are computed first and select.

    Args:
        beta: β, the weight of the KL term; None: 6.0.
        eps: radius of the ball; None: 0.031, in L∞ only.
        norm: "linf", "l2" or :class:`Normalized`.
        bounds: valid range (low, high) of ``x``; "auto": (0, 1), or that of :class:`Normalized`.
        selection, attack_mode, generator, attack, label_smoothing: see :class:`AdversarialObjective`.
    """

    usual_beta = 6.0
    attack_loss = "ce"
    random_start = "normal"
    own_selection = "train"
    options = SMOOTHED

    def loss(
        self, z: Tensor | None, z_prime: Tensor, y: Tensor, touched: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """BCE(z', y) + β·KL(softmax z ‖ softmax z')·(1 − p_y(z)); neither KL target nor weight is detached."""
        assert z is not None
        z_prime = at_least_float32(z_prime)
        p, p_prime = probabilities(at_least_float32(z)), F.softmax(z_prime, dim=1)
        rival = p_prime.scatter(1, y[:, None], -1.0).argmax(dim=1)  # the likeliest wrong class
        log_rest = torch.log(1.0001 - p_prime + 1e-12)
        if weight is None:
            margin = F.nll_loss(log_rest, rival)
        else:
            margin = (weight * F.nll_loss(log_rest, rival, reduction="none")).mean()
        boosted = cross_entropy(z_prime, y, weight, self.label_smoothing) + margin
        m = len(y)
        if touched is not None:
            p, p_prime, y = p[touched], p_prime[touched], y[touched]
        doubt = 1.0000001 - p.gather(1, y[:, None])[:, 0]
        kl = F.kl_div(torch.log(p_prime + 1e-12), p, reduction="none").sum(dim=1)
        return boosted + self.beta * mean_over(kl * doubt, m, weight, touched)
