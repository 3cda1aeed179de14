"""One ascent step of an attack: by the gradient of the whole network, or by a cheaper substitute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from bullettrain.attacks.state import dynamic, forward_some

LogitGradient = Callable[[Tensor], Tensor]
"""``gradient(logits (n, K)) -> (n, K)``: gradient of the summed attack loss at the logits."""

Move = Callable[[Tensor, Tensor], Tensor]
"""``move(images (n, …), gradient (n, …)) -> (n, …)``: one step along the gradient, projected into the ball."""


class AscentStep(Protocol):
    """One step of an attack."""

    @property
    def passes(self) -> float:
        """Passes per example of one step."""
        ...

    def __call__(self, net: nn.Module, images: Tensor, gradient: LogitGradient, move: Move) -> tuple[Tensor, Tensor]:
        """Return the moved ``images`` (n, …) and the logits (n, K) before the step. ``net`` is frozen."""
        ...


class WholeNetwork:
    """The usual step: a forward, a backward to the input, and a move."""

    passes: float = 2

    def __repr__(self) -> str:
        return type(self).__name__

    def __call__(self, net: nn.Module, images: Tensor, gradient: LogitGradient, move: Move) -> tuple[Tensor, Tensor]:
        """Move along the gradient at ``images``."""
        at = images.detach().requires_grad_()
        logits = forward_some(net, dynamic(at) if hasattr(net, "_orig_mod") else at)
        at_logits = gradient(logits)
        if not logits.requires_grad:
            raise ValueError("the logits have no gradient to the input; take no_grad or detach out of the network")
        (to_input,) = torch.autograd.grad(logits, at, at_logits)
        return move(at.detach(), to_input), logits.detach()


WHOLE_NETWORK = WholeNetwork()
