"""The network held still in the group engine: what is attacked, and what selects by eval-mode logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bullettrain.engine.copies import Shadow
from bullettrain.engine.learner import compiled, dynamic


class Still:
    """A copy of a network in eval mode, without gradients for weights, as the network was when it was last refreshed.

    Args:
        network: the bare module.
        half, compile: run the copy in bf16, compiled.
    """

    def __init__(self, network: nn.Module, *, half: bool, compile: bool) -> None:
        self.shadow, self.compile = Shadow(network, half), compile
        self.net: nn.Module = compiled(self.shadow) if compile else self.shadow

    def refresh(self) -> None:
        """The network as it is now."""
        self.shadow.refresh()

    def logits(self, x: Tensor) -> Tensor:
        """(n, K) of x (n, …); run like an attack's forward, so that no second version has to be compiled."""
        with torch.enable_grad():
            logits: Tensor = self.net(dynamic(x.detach().requires_grad_(self.compile)))
        return logits.detach()
