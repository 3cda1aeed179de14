"""NuAT: one guided step, and a loss that holds the predictions of a whole mini-batch together."""

from __future__ import annotations

import torch
from torch import Tensor

from bullettrain.allocation import Allocation
from bullettrain.baselines.gat import GAT, gat
from bullettrain.step import BulletTrain


class NuAT(GAT):
    """Sriramanan et al. (2021): CE(z, y) + λ·‖Z' − Z‖_*/m, with x' by ascent on CE(z', y) plus that term.

    Z and Z' are the (m, K) matrices of the mini-batch's logits, and ‖·‖_* is the nuclear norm, the sum of singular
    values. As in the authors' code noise, step and every other attack are those of :class:`GAT`; λ grows from 0 to 4.5
    over the first 90 % of the training (theirs epoch by epoch, at batches of 64). A loop of one's own says how far it
    is, ``train.objective.progress(step / steps)``, else λ is 4.5 throughout.

    Mini-batches that are attacked together, or shared by several processes, each have the norm of what is attacked, or
    trained on, at once.

    Args: see :class:`GAT`.
    """

    usual_beta = 4.5

    def growth(self, done: float) -> float:
        """Linear, then 1."""
        return min(1.0, done / 0.9)

    def target_of(self, logits: Tensor) -> Tensor:
        """The logits themselves."""
        return logits

    def distance(self, z_prime: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """The nuclear norm of the differences, its rows by their weights."""
        difference = z_prime - target if weight is None else weight[:, None] * (z_prime - target)
        # ‖D‖_* = ⟨D, U·Vᵀ⟩, and U·Vᵀ is its gradient.
        return (difference * polar_factor(difference.detach())).sum()

    def distance_gradient(self, z_prime: Tensor, target: Tensor) -> Tensor:
        """U·Vᵀ of the differences."""
        return polar_factor(z_prime - target)

    def check_budget(self, budget: Allocation) -> None:
        """The same steps for everyone: the norm is of all rows of the mini-batch."""
        if not budget.uniform_steps or hasattr(budget, "revise"):
            raise ValueError("NuAT was given other steps for other examples, or none; it wants the same for all")


def polar_factor(matrix: Tensor, iterations: int = 24) -> Tensor:
    """U·Vᵀ of the singular value decomposition of a matrix (m, K), by Newton–Schulz iterations.

    Unlike a decomposition they need no read by the host, so that a CUDA graph can hold them. A singular value that is
    a thousandth of the matrix's length or more comes out as 1 in single precision, a smaller one as less, 0 as 0.
    """
    with torch.autocast(matrix.device.type, enabled=False):
        found: Tensor = matrix / torch.linalg.matrix_norm(matrix).clamp_min(torch.finfo(matrix.dtype).tiny)
        for _ in range(iterations):
            found = torch.addmm(found, found, found.mT @ found, beta=1.5, alpha=-0.5)
    return found


def nuat(objective: NuAT) -> BulletTrain:
    """NuAT with its one step of ε for everyone."""
    return gat(objective)
