"""The moving average of a network: as torch moves it, and so that a CUDA graph can hold it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class MovingAverage(AveragedModel):
    """Of weights, statistics and counts; the first `update_parameters` copies the network's."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        ema = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        super().__init__(network, multi_avg_fn=ema, use_buffers=True)
        self.ema, self.decay = ema, decay

    def move(self, network: nn.Module) -> None:
        """What `update_parameters` does from the second time on, without a look at anything by the host."""
        self.ema(_floating(self.module), _floating(network), None)
        pairs = list(zip(self.module.buffers(), network.buffers(), strict=True))
        for dtype in dict.fromkeys(mean.dtype for mean, _ in pairs if not mean.is_floating_point()):
            # At once: one by one they would be four kernels each.
            means, counts = zip(*[pair for pair in pairs if pair[0].dtype == dtype], strict=True)
            old, new = (torch.cat([t.flatten() for t in side]) for side in (means, counts))
            moved = torch.split((old * self.decay + new * (1 - self.decay)).to(dtype), [t.numel() for t in means])
            torch._foreach_copy_(means, [part.view_as(mean) for part, mean in zip(moved, means, strict=True)])
        self.n_averaged.add_(1)


def _floating(network: nn.Module) -> list[Tensor]:
    return [t for t in (*network.parameters(), *network.buffers()) if t.is_floating_point()]
