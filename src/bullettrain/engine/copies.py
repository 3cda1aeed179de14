"""Copies of a network that the group engine works with: one to attack, one to run beside the first."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Shadow(nn.Module):
    """A copy of a network for attacks: eval mode, no gradient for weights, convolutions in the attack's precision."""

    def __init__(self, network: nn.Module, half: bool) -> None:
        super().__init__()
        self.copy = copy.deepcopy(network).eval().requires_grad_(False)
        self.half_precision = half
        if half:
            for module in self.copy.modules():
                if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)):
                    module.to(torch.bfloat16)
        mine = [*self.copy.parameters(), *self.copy.buffers()]
        theirs = [*network.parameters(), *network.buffers()]
        self._pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a.is_floating_point()]

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, K)."""
        logits: Tensor = self.copy(x.to(torch.bfloat16) if self.half_precision else x)
        return logits

    def refresh(self) -> None:
        """The network's weights and statistics as they are now."""
        with torch.no_grad():
            torch._foreach_copy_([a for a, _ in self._pairs], [b for _, b in self._pairs])

    def train(self, mode: bool = True) -> Shadow:
        """Stays in eval mode."""
        return self


class Twin:
    """The same weights with batch-norm statistics of their own, for a second forward at the same time.

    Settled, the statistics are what two forwards one after the other leave: with r₀ before, r₁ after the first
    and r' after the second from r₀, (1 − μ)·r₁ + r' − (1 − μ)·r₀.
    """

    def __init__(self, network: nn.Module) -> None:
        self.copy = copy.deepcopy(network, {id(p): p for p in network.parameters()})
        pairs = zip(network.modules(), self.copy.modules(), strict=True)
        self.norms = [
            (a, b)
            for a, b in pairs
            if isinstance(a, _BatchNorm) and isinstance(b, _BatchNorm) and a.running_mean is not None
        ]
        if any(a.momentum is None for a, _ in self.norms):
            raise ValueError("parallel updates need batch norms with a momentum; this network's average cumulatively")
        self.stream: torch.cuda.Stream | None = None
        self.before: list[Tensor] = []

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What runs in here runs beside what follows, until :meth:`join`; on a CPU one after the other."""
        with torch.no_grad():
            self.before = [t.clone() for a, _ in self.norms for t in _statistics(a)]
            for mine, value in zip((t for _, b in self.norms for t in _statistics(b)), self.before, strict=True):
                mine.copy_(value)
        if not next(self.copy.parameters()).is_cuda:
            yield
            return
        if self.stream is None:
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Wait for the second forward."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def settle(self) -> None:
        """Make one history of the statistics; after the backward, whose graph holds them."""
        with torch.no_grad():
            old = iter(self.before)
            for a, b in self.norms:
                for mine, other in zip(_statistics(a), _statistics(b), strict=True):
                    mine.sub_(next(old)).mul_(1 - (a.momentum or 0.0)).add_(other)
                if a.num_batches_tracked is not None:
                    a.num_batches_tracked.add_(1)
        self.before = []


def _statistics(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean, norm.running_var
