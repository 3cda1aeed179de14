"""How an attack takes one of its steps: by the gradient of the whole network, or by a cheaper stand-in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from bullettrain.attacks.state import forward_some
from bullettrain.checks import check_positive

Value = Callable[[Tensor], Tensor]
"""``value(logits (n, K)) -> 0-d``: the attack's loss summed over the examples, to be made large."""

Move = Callable[[Tensor, Tensor], Tensor]
"""``move(images (n, …), gradient (n, …)) -> (n, …)``: along the gradient by the step size, then back into the ball."""

RandomStart = Literal["uniform", "normal", "clipped", "zero"]
"""Where an attack starts: uniform in the ball; x + 0.001·N(0,1); uniform, clipped to valid pixels; x itself."""


class Climb(Protocol):
    """One step of an attack."""

    not_captured: str | None
    """Why it cannot be captured as a CUDA graph, where it cannot."""

    @property
    def passes(self) -> float:
        """What a step costs an example, in passes over the network."""
        ...

    def __call__(self, net: nn.Module, images: Tensor, value: Value, move: Move) -> Tensor:
        """Moved ``images`` (n, …). ``net`` is held still in the attack's mode, and gradients are on."""
        ...


class WholeNetwork:
    """The usual step: one forward, one backward to the input, one move."""

    not_captured: str | None = None
    passes: float = 2

    def __call__(self, net: nn.Module, images: Tensor, value: Value, move: Move) -> Tensor:
        """One move along the gradient at ``images``."""
        at = images.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(value(forward_some(net, at)), at)
        return move(at.detach(), gradient)


WHOLE_NETWORK = WholeNetwork()


@dataclass(frozen=True)
class Attack:
    """How an objective's attack starts and moves, where it is not the objective's own way.

    Args:
        start: see :data:`RandomStart`; None: the objective's own.
        radius: of a uniform start, in units of eps.
        project: bring each step back into the ball of eps. False: into valid pixels only.
        climb: how a step is taken.
    """

    start: RandomStart | None = None
    radius: float = 1.0
    project: bool = True
    climb: Climb = WHOLE_NETWORK

    def __post_init__(self) -> None:
        check_positive(self.radius, "radius")
