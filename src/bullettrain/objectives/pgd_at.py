"""PGD adversarial training: learn from the attacked examples alone."""

from __future__ import annotations

from torch import Tensor

from bullettrain.objectives.base import SMOOTHED, AdversarialObjective, cross_entropy
from bullettrain.precision import at_least_float32


class PGDAT(AdversarialObjective):
    """Madry et al.: CE(z', y), with x' by ascent on the cross-entropy from a uniform start in the ball.

    Its loss has no clean term. The batch x', which contains untouched examples unchanged, is forwarded once, and
    selecting costs a clean forward of its own.

    Args:
        eps: radius of the ball; None: 0.031, in L∞ only.
        norm: "linf", "l2" or :class:`Normalized`.
        bounds: valid range (low, high) of ``x``; "auto": (0, 1), or that of :class:`Normalized`.
        selection, attack_mode, generator, attack, label_smoothing: see :class:`AdversarialObjective`.
    """

    title = "PGD-AT"
    attack_loss = "ce"
    random_start = "uniform"
    has_clean_term = False
    options = SMOOTHED

    def loss(
        self, z: Tensor | None, z_prime: Tensor, y: Tensor, touched: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """CE(z', y); ``z`` may be None."""
        return cross_entropy(at_least_float32(z_prime), y, weight, self.label_smoothing)
