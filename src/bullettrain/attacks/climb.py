"""How an attack takes one of its steps: by the gradient of the whole network, or by a cheaper stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from bullettrain.attacks.state import forward_some

Value = Callable[[Tensor], Tensor]
"""``value(logits (n, K)) -> 0-d``: the attack's loss summed over the examples, to be made large."""

Move = Callable[[Tensor, Tensor], Tensor]
"""``move(images (n, …), gradient (n, …)) -> (n, …)``: along the gradient by the step size, then back into the ball."""


class Climb(Protocol):
    """One step of an attack."""

    not_grouped: str | None
    """Why the group engine cannot take such steps, where it cannot."""

    @property
    def passes(self) -> float:
        """What a step costs an example, in passes over the network."""
        ...

    def __call__(self, net: nn.Module, images: Tensor, value: Value, move: Move) -> Tensor:
        """Moved ``images`` (n, …). ``net`` is held still in the attack's mode, and gradients are on."""
        ...


class WholeNetwork:
    """The usual step: one forward, one backward to the input, one move."""

    not_grouped: str | None = None
    passes: float = 2

    def __call__(self, net: nn.Module, images: Tensor, value: Value, move: Move) -> Tensor:
        """One move along the gradient at ``images``."""
        at = images.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(value(forward_some(net, at)), at)
        return move(at.detach(), gradient)


WHOLE_NETWORK = WholeNetwork()
