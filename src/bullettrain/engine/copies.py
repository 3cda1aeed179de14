"""The copy of a network that the group engine attacks, and weights in half precision."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Shadow(nn.Module):
    """A copy of a network for attacks: eval mode, no gradient for weights, convolutions in the attack's precision."""

    def __init__(self, network: nn.Module, half: bool) -> None:
        super().__init__()
        self.copy = copy.deepcopy(network).eval().requires_grad_(False)
        self.half_precision = half
        if half:
            to_half(self.copy)
        theirs = _tensors(network)  # by name: in half precision a weight that a layer shares is no longer shared
        pairs = [(mine, theirs[name]) for name, mine in _tensors(self.copy).items() if mine.is_floating_point()]
        # By precision: a mixture would be copied one by one.
        self._alike = [[p for p in pairs if (p[0].dtype == p[1].dtype) == same] for same in (True, False)]

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, K)."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half_precision):
            logits: Tensor = self.copy(x.to(torch.bfloat16) if self.half_precision else x)
        return logits

    def refresh(self) -> None:
        """The network's weights and statistics as they are now."""
        with torch.no_grad():
            for pairs in self._alike:
                if pairs:
                    torch._foreach_copy_([mine for mine, _ in pairs], [theirs for _, theirs in pairs])

    def train(self, mode: bool = True) -> Shadow:
        """Stays in eval mode."""
        return self


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    named = [network.named_parameters(remove_duplicate=False), network.named_buffers(remove_duplicate=False)]
    return {name: tensor for part in named for name, tensor in part}


def to_half(network: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Give convolutions and linear layers weights of their own in bf16: (own, what was there)."""
    own: dict[Tensor, nn.Parameter] = {}
    for module in network.modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)):
            for name, p in list(module.named_parameters(recurse=False)):
                if p not in own:  # a weight that two layers share stays one
                    own[p] = nn.Parameter(p.detach().to(torch.bfloat16), requires_grad=p.requires_grad)
                setattr(module, name, own[p])
    return [(mine, theirs) for theirs, mine in own.items()]
