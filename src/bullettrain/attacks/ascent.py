"""How an attack takes one of its steps: by the gradient of the whole network, or by a cheaper stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from bullettrain.attacks.state import dynamic, forward_some

LogitGradient = Callable[[Tensor], Tensor]
"""``gradient(logits (n, K)) -> (n, K)``: of the attack's loss, summed over the examples, at the logits."""

Move = Callable[[Tensor, Tensor], Tensor]
"""``move(images (n, …), gradient (n, …)) -> (n, …)``: along the gradient by the step size, then back into the ball."""


class AscentStep(Protocol):
    """One step of an attack."""

    @property
    def passes(self) -> float:
        """What a step costs an example, in passes over the network."""
        ...

    def __call__(self, net: nn.Module, images: Tensor, gradient: LogitGradient, move: Move) -> tuple[Tensor, Tensor]:
        """Moved ``images`` (n, …), and the logits (n, K) from before. ``net`` is frozen, and gradients are on."""
        ...


class WholeNetwork:
    """The usual step: one forward, one backward to the input, one move."""

    passes: float = 2

    def __call__(self, net: nn.Module, images: Tensor, gradient: LogitGradient, move: Move) -> tuple[Tensor, Tensor]:
        """One move along the gradient at ``images``."""
        at = images.detach().requires_grad_()
        logits = forward_some(net, dynamic(at) if hasattr(net, "_orig_mod") else at)
        (to_input,) = torch.autograd.grad(logits, at, gradient(logits))
        return move(at.detach(), to_input), logits.detach()


WHOLE_NETWORK = WholeNetwork()
