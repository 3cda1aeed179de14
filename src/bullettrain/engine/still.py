"""The network held still in the group engine: what is attacked, and what selects by eval-mode logits."""

from __future__ import annotations

import time

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
        self.network, self.half, self.compile = network, half, compile
        self._take(Shadow(network, half))
        self._looked = False
        self.seconds = 0.0
        """Spent on looking."""

    def look_at(self, x: Tensor) -> None:
        """Of a first batch, which shows how short a program the compiler can be given."""
        began = time.perf_counter()
        if self.compile and not self._looked and Shadow.folds(self.network, x):
            self._take(Shadow(self.network, self.half, folded=True))
        self._looked = True
        self.seconds += time.perf_counter() - began

    def _take(self, shadow: Shadow) -> None:
        self.shadow = shadow
        self.net: nn.Module = compiled(shadow) if self.compile else shadow

    def refresh(self) -> None:
        """The network as it is now."""
        self.shadow.refresh()

    def logits(self, x: Tensor) -> Tensor:
        """(n, K) of x (n, …); run like an attack's forward, so that no second version has to be compiled."""
        with torch.enable_grad():
            logits: Tensor = self.net(dynamic(x.detach().requires_grad_(self.compile)))
        return logits.detach()
