"""Copies of a network that the group engine works with: one to attack, one to learn from two batches at once."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bullettrain.attacks.state import training
from bullettrain.precision import wide


class Shadow(nn.Module):
    """A copy of a network for attacks: eval mode, no gradient for weights, convolutions in the attack's precision."""

    def __init__(self, network: nn.Module, half: bool) -> None:
        super().__init__()
        self.copy = copy.deepcopy(network).eval().requires_grad_(False)
        self.half_precision = half
        if half:
            _to_half(self.copy)
        mine = [*self.copy.parameters(), *self.copy.buffers()]
        theirs = [*network.parameters(), *network.buffers()]
        pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a.is_floating_point()]
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


class Joint(nn.Module):
    """Two batches in one training-mode forward, each with batch-norm statistics of its own.

    Convolutions see one larger batch, and everything comes out as from two forwards one after the other, running
    statistics included. Batch norms, with their parameters and statistics, are the network's own; in half precision
    convolutions and linear layers are copies, which :meth:`refresh` sets and :meth:`give_back` collects from.
    """

    count: Tensor

    def __init__(self, network: nn.Module, half: bool) -> None:
        super().__init__()
        some = next(network.parameters())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=some.device), persistent=False)
        memo: dict[int, object] = {
            id(norm): _JointNorm(norm, self.count) for norm in network.modules() if isinstance(norm, _BatchNorm)
        }
        shared = [*network.parameters(), *network.buffers()]
        self.copy = copy.deepcopy(network, memo | {id(t): t for t in shared})
        self.half_precision = half
        self._pairs = _to_half(self.copy) if half else []

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, K) of images of which the first ``count`` are one batch and the others another."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half_precision):
            logits: Tensor = self.copy(x.to(torch.bfloat16) if self.half_precision else x)
        return logits

    def refresh(self) -> None:
        """The weights as they are now, without gradients."""
        with torch.no_grad():
            if self._pairs:
                torch._foreach_copy_([mine for mine, _ in self._pairs], [theirs for _, theirs in self._pairs])
        for mine, _ in self._pairs:
            mine.grad = None

    def give_back(self) -> None:
        """The copies' gradients to the network's weights, in their precision."""
        pairs = [(mine.grad, theirs) for mine, theirs in self._pairs if mine.grad is not None]
        if not pairs:
            return
        wider = [torch.empty_like(theirs) for _, theirs in pairs]
        torch._foreach_copy_(wider, [gradient for gradient, _ in pairs])
        for gradient, (_, theirs) in zip(wider, pairs, strict=True):
            theirs.grad = gradient

    @staticmethod
    def suits(network: nn.Module, x: Tensor) -> bool:
        """Whether one joint forward of this network is two forwards: tried on five images of ``x``.

        It is not where examples look at each other otherwise than in a batch norm, or where chance plays a part.
        """
        norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
        if len(x) < 5 or any(norm.running_mean is None or norm.momentum is None for norm in norms):
            return False
        one, two, cuda = copy.deepcopy(network), copy.deepcopy(network), [x.device] if x.is_cuda else []
        with torch.random.fork_rng(devices=cuda), torch.no_grad(), training(one), training(two):
            joint = Joint(one, half=False)
            joint.count.fill_(3)
            together = joint(x[:5])
            apart = torch.cat([two(x[:3]), two(x[3:5])])
        pairs = [(together, apart), *zip(one.buffers(), two.buffers(), strict=True)]
        # Rounding, and TF32, are far below this; examples that see each other are far above.
        return all(bool((a - b).abs().max() <= 0.02 * b.abs().max()) for a, b in pairs if b.numel())


class _JointNorm(nn.Module):
    """A batch norm over rows [0, count) and over the rest, each by its own mean and variance.

    Sums of each row come first, then those over the rows of a batch: a small table (n, C) instead of passes over
    the images for each of the batches. Values are taken from the running mean, so that squares do not cancel.
    """

    count: Tensor

    def __init__(self, norm: _BatchNorm, count: Tensor) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("count", count, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (n, C, …) normalised."""
        norm, n = self.norm, len(x)
        if not norm.training:
            normal: Tensor = norm(x)
            return normal
        assert norm.running_mean is not None
        shape = (1, -1, *(1,) * (x.ndim - 2))
        centre = norm.running_mean.clone()
        values = wide(x) - centre.view(shape)
        row_sum, row_square = values, values.square()
        if x.ndim > 2:
            row_sum, row_square = (t.sum(dim=tuple(range(2, x.ndim))) for t in (row_sum, row_square))
        each = values[0, 0].numel()
        first = (torch.arange(n, device=x.device) < self.count)[:, None]
        scales, shifts = [], []
        for rows, size in ((first, self.count), (~first, n - self.count)):
            number = (size * each).to(values.dtype)
            some = number.clamp_min(1)  # an empty batch has no statistics, and changes none
            mean = torch.where(rows, row_sum, 0).sum(dim=0) / some
            var = (torch.where(rows, row_square, 0).sum(dim=0) / some - mean.square()).clamp_min(0)
            scale = (var + norm.eps).rsqrt()
            if norm.weight is not None:
                scale = scale * norm.weight
            shift = -mean * scale
            if norm.bias is not None:
                shift = shift + norm.bias
            scales.append(scale)
            shifts.append(shift)
            with torch.no_grad():
                self._remember(centre + mean.detach(), var.detach(), number)
        shape = (n, -1, *shape[2:])
        scale, shift = (torch.where(first, a, b).view(shape) for a, b in (scales, shifts))
        return (values * scale + shift).to(x.dtype)

    def _remember(self, mean: Tensor, var: Tensor, number: Tensor) -> None:
        """Move the running statistics as the norm itself would."""
        norm = self.norm
        assert norm.running_mean is not None
        assert norm.running_var is not None
        momentum = (number > 0).to(mean.dtype) * (norm.momentum or 0.0)
        unbiased = var * (number / (number - 1).clamp_min(1))
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum.to(norm.running_mean.dtype))
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum.to(norm.running_var.dtype))
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_((number > 0).to(torch.int64))


def _to_half(network: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Give convolutions and linear layers weights of their own in bf16: (own, what was there)."""
    own: dict[Tensor, nn.Parameter] = {}
    for module in network.modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)):
            for name, p in list(module.named_parameters(recurse=False)):
                if p not in own:  # a weight that two layers share stays one
                    own[p] = nn.Parameter(p.detach().to(torch.bfloat16), requires_grad=p.requires_grad)
                setattr(module, name, own[p])
    return [(mine, theirs) for theirs, mine in own.items()]
