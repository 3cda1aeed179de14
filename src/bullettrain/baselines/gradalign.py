"""GradAlign: one FGSM step, and a penalty that keeps the loss locally linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.attacks import Attack
from bullettrain.attacks.ascent import LogitGradient, Move, WholeNetwork
from bullettrain.attacks.norms import length, per_example
from bullettrain.attacks.state import uncompiled, underflows
from bullettrain.baselines.fast import grown
from bullettrain.engine.forwards import forward
from bullettrain.objectives import PGDAT
from bullettrain.precision import at_least_float32
from bullettrain.validation import check_start


class GradAlign(PGDAT):
    """Andriushchenko and Flammarion: CE(z', y) + λ·(1 − cos(∇x L(x), ∇x L(x+η))), η uniform in the ball.

    The attack starts at x, so that its first gradient is ∇x L(x). As in the authors' code this gradient is held fixed,
    and the network learns through the other one. Both are computed in training mode.

    Args:
        beta: λ; 0.2 at eps = 8/255, and more for larger eps; others: see :class:`AdversarialObjective`.
    """

    usual_beta = 0.2
    options = ("attack_mode", "generator")
    attack_mode = "train"
    one_by_one = uniform_only = True
    penalty_passes = 6
    """The gradient at x+η is a forward and a backward; learning through it takes two more of each."""

    def set_up(self) -> None:
        """Attack from x, and keep the first gradient."""
        self._first = _FirstGradient()
        self.attack = Attack(start="zero", ascent=self._first)

    def noise(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """η (m, …), uniform in the ball."""
        return self.norm.noise(like, self.ball.on(like).eps, generator)

    def begin(self, x: Tensor, start: Tensor | None) -> Tensor:
        """Return x, where the attack starts. ``start`` is x+η, for :meth:`penalty`."""
        self._first.begin(x)
        return x

    def mutable_state(self, x: Tensor) -> list[Tensor]:
        """Return the first gradient of the rows of ``x`` (m, …), and whether it is still to come."""
        return self._first.state(x)

    def penalty(
        self, model: nn.Module, x: Tensor, y: Tensor, start: Tensor | None, weight: Tensor | None = None
    ) -> Tensor:
        """Return λ·(1 − cos), averaged over the examples whose two gradients are not 0, and weighted."""
        at_x, _ = self._first.state(x)
        at = check_start(self.initial_perturbation(x) if start is None else start, x).requires_grad_()
        # DistributedDataParallel has seen the first forward, and synchronises the gradients of this one.
        value = F.cross_entropy(at_least_float32(forward(uncompiled(model), at)), y, reduction="sum")
        (near_x,) = torch.autograd.grad(value * 1024 if underflows(x.device) else value, at, create_graph=True)
        cosine = (_unit(at_x) * _unit(near_x)).flatten(1).sum(dim=1)
        defined = (length(at_x) > 0) & (length(near_x) > 0)
        apart = torch.where(defined, 1 - cosine, 0.0)
        apart = apart if weight is None else apart * weight
        return self.beta * apart.sum() / defined.sum().clamp_min(1)


def _unit(gradient: Tensor) -> Tensor:
    """Return the gradients (m, …) with length 1 for each example; 0 stays 0."""
    lengths = length(gradient)
    return gradient / per_example(torch.where(lengths > 0, lengths, 1.0), gradient)


class _FirstGradient(WholeNetwork):
    """The usual step, which stores the first gradient of an attack, in place."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None
        """(M, …) for the largest batch so far."""
        self.missing = torch.ones(())
        """1 until the first step of an attack, then 0."""

    def begin(self, x: Tensor) -> None:
        """Begin an attack on ``x`` (m, …)."""
        self.state(x)[1].fill_(1)

    def state(self, x: Tensor) -> list[Tensor]:
        """Return the gradient for the rows of ``x`` (m, …), as a view, and whether it is missing."""
        self.gradient, self.missing = grown(self.gradient, x), self.missing.to(x.device)
        return [self.gradient[: len(x)], self.missing]

    def __call__(self, net: nn.Module, images: Tensor, gradient: LogitGradient, move: Move) -> tuple[Tensor, Tensor]:
        """Move along the gradient at ``images``."""
        kept, missing = self.state(images)

        def keep(at: Tensor, to_input: Tensor) -> Tensor:
            kept.copy_(torch.where(missing > 0, to_input, kept))
            missing.zero_()
            return move(at, to_input)

        return super().__call__(net, images, gradient, keep)
