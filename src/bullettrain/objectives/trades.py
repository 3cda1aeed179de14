"""TRADES: a clean term, and a robust one that keeps the corrupted prediction near the clean one."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.allocation import Cost
from bullettrain.objectives.base import RegularizedObjective, mean_over
from bullettrain.precision import wide


class TRADES(RegularizedObjective):
    """Zhang et al.: CE(z, y) + β·KL(softmax z ‖ softmax z'), with x' by ascent on the same KL.

    The attack's target, the clean probabilities in eval mode, is computed once; the same logits select.

    Args:
        beta: β = 1/λ, the weight of the robust term; others: see :class:`AdversarialObjective`.
    """

    attack_loss = "kl"
    random_start = "normal"

    @property
    def cost(self) -> Cost:
        """1 + 2N + 6 plain; 1 + 2Σ + 3·(2 − s) with mining."""
        selection, step = 1 if self.selection == "eval" else 0, self.attack.climb.passes
        return Cost(selection=selection, target=1, shared=self._target_selects, step=step)

    @property
    def _target_selects(self) -> bool:
        """Whether the logits that select are the target: both of the network held in eval mode."""
        return self.selection == self.attack_mode == "eval"

    def attack_target(self, model: nn.Module, x: Tensor, s: Tensor | None) -> Tensor:
        """Clean probabilities (m, K) in the attack's mode: those of ``s`` where it is of that mode."""
        if s is None or not self._target_selects:
            s = self._logits_held(model, x, self.attack_mode)
        return wide(s).softmax(dim=1)

    def loss(self, z: Tensor | None, z_prime: Tensor, y: Tensor, touched: Tensor | None = None) -> Tensor:
        """CE(z, y) + β·KL(softmax z ‖ softmax z'); the target of the KL is not detached."""
        assert z is not None
        z, z_prime = wide(z), wide(z_prime)
        clean, corrupted = (z, z_prime) if touched is None else (z[touched], z_prime[touched])
        kl = F.kl_div(F.log_softmax(corrupted, dim=1), F.softmax(clean, dim=1), reduction="none").sum(dim=1)
        return F.cross_entropy(z, y) + self.beta * mean_over(kl, len(y))
