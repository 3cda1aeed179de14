"""NuAT: one guided step, and a loss with the nuclear norm of a mini-batch's change of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from bullettrain.baselines.gat import GAT


class NuAT(GAT):
    """Sriramanan et al. (2021): CE(z, y) + λ·‖Z' − Z‖_*/m, with x' by ascent on CE(z', y) plus that term.

    Z and Z' are the (m, K) matrices of the mini-batch's logits, and ‖·‖_* is the nuclear norm, the sum of singular
    values. As in the authors' code, noise, step and alternating attacks are those of :class:`GAT`, and λ grows from 0
    to 4.5 over the first 90 % of the training (in their code epoch by epoch, with batches of 64). Call
    ``train.objective.progress(step / steps)`` in your own loop, else λ is 4.5 throughout.

    With several mini-batches attacked together, or several processes, the norm is of the rows that are attacked, or
    trained on, at once.

    Args: see :class:`GAT`.
    """

    usual_beta = 4.5
    uniform_only = whole_batch = True  # the norm is of all rows of the mini-batch

    def growth(self, done: float) -> float:
        """Linear, then 1."""
        return min(1.0, done / 0.9)

    def target_of(self, logits: Tensor) -> Tensor:
        """The logits themselves."""
        return logits

    def distance(self, z_prime: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Return the nuclear norm of the differences, with rows weighted."""
        difference = z_prime - target if weight is None else weight[:, None] * (z_prime - target)
        # ‖D‖_* = ⟨D, U·Vᵀ⟩, and U·Vᵀ is its gradient.
        return (difference * polar_factor(difference.detach())).sum()

    def distance_gradient(self, z_prime: Tensor, target: Tensor) -> Tensor:
        """Return U·Vᵀ of the differences."""
        return polar_factor(z_prime - target)


def polar_factor(matrix: Tensor, iterations: int = 24) -> Tensor:
    """Return U·Vᵀ of the singular value decomposition of a matrix (m, K), by Newton–Schulz iterations.

    Unlike a decomposition, these can be captured in a CUDA graph. In single precision a singular value of at least a
    thousandth of the matrix's Frobenius norm becomes 1, a smaller one less, and 0 stays 0.
    """
    with torch.autocast(matrix.device.type, enabled=False):
        found: Tensor = matrix / torch.linalg.matrix_norm(matrix).clamp_min(torch.finfo(matrix.dtype).tiny)
        for _ in range(iterations):
            found = torch.addmm(found, found, found.mT @ found, beta=1.5, alpha=-0.5)
    return found
