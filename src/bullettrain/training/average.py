"""The moving average of a network, moved without a look at anything by the host: a CUDA graph can hold it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

ENOUGH = 4096
"""Training examples that batch-norm statistics are taken of."""


class MovingAverage(nn.Module):
    """Of weights and statistics; of counts, the network's own.

    A mean of statistics is not that of the mean weights: before these are judged, they get their own, within
    :func:`statistics_anew`.

    Update n, counted from 0, keeps min(``decay``, n / (n + 9)) of the average: the first copies the network, and a
    short run's average is not of weights from before it had learned. At 0.999 that ends after 8,991 updates.
    """

    n_averaged: Tensor
    """Updates so far; on the network's device, and saved with the rest."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        super().__init__()
        self.module, self.decay = copy.deepcopy(network).requires_grad_(False), decay
        self.register_buffer("n_averaged", torch.zeros((), dtype=torch.int64, device=next(network.parameters()).device))

    @torch.no_grad()
    def move(self, network: nn.Module) -> None:
        """Take the network as it is now into the average."""
        kept = (self.n_averaged / (self.n_averaged + 9)).clamp(max=self.decay)
        pairs = list(zip(_tensors(self.module), _tensors(network), strict=True))
        for dtype in dict.fromkeys(mean.dtype for mean, _ in pairs):
            means, values = zip(*[pair for pair in pairs if pair[0].dtype == dtype], strict=True)
            if dtype.is_floating_point:
                torch._foreach_sub_(means, values)
                torch._foreach_mul_(means, kept.to(dtype))  # of their own type: else it is a kernel a tensor
                torch._foreach_add_(means, values)
            else:
                torch._foreach_copy_(means, values)
        self.n_averaged.add_(1)


def norms(network: nn.Module) -> list[_BatchNorm]:
    """Its batch norms that keep statistics and learn them."""
    found = [module for module in network.modules() if isinstance(module, _BatchNorm) and module.training]
    return [norm for norm in found if norm.running_mean is not None]


@contextmanager
def statistics_anew(network: nn.Module, first: Tensor) -> Iterator[None]:
    """Within, batch norms forget their statistics, and take the plain mean of those of the batches that they see.

    Until they have seen one they have those of ``first``, images (n, …). Counts, and on an exception everything, are
    put back.
    """
    learning = norms(network)
    momenta = [norm.momentum for norm in learning]
    before = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in learning]
    changed = {"num_batches_tracked"}
    try:
        for norm in learning:
            norm.reset_running_stats()
            norm.momentum = None
        with torch.no_grad():
            network(first)
        for norm in learning:
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked.zero_()
        yield
    except BaseException:
        changed |= {"running_mean", "running_var"}
        raise
    finally:
        for norm, momentum, buffers in zip(learning, momenta, before, strict=True):
            norm.momentum = momentum
            norm.load_state_dict({k: v for k, v in buffers.items() if k in changed}, strict=False)


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]
