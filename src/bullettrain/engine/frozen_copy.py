"""The frozen copy of a network that attacks run on, and weights in low precision."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class FrozenCopy(nn.Module):
    """A copy of a network for attacks: in eval mode, without gradients for weights, in the attack's precision.

    Args:
        network: the network to copy.
        dtype: precision of convolutions and linear layers; None: that of the weights.
        folded: replace batch norms by a scale and a shift, which halves the program to compile. See :meth:`folds`.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype | None, folded: bool = False) -> None:
        super().__init__()
        self._folds = {norm: _Affine(norm) for norm in network.modules() if _is_plain(norm)} if folded else {}
        memo: dict[int, object] = {id(norm): affine for norm, affine in self._folds.items()}
        self.copy = copy.deepcopy(network, memo).eval().requires_grad_(False)
        self.dtype = dtype
        if dtype is not None:
            cast_layers(self.copy, dtype)
        theirs = _tensors(network)  # by name: a cast weight is no longer shared between layers
        # Grouped by dtype: torch copies mixed lists tensor by tensor.
        self._alike: dict[object, list[tuple[Tensor, Tensor]]] = {}
        for name, mine in _tensors(self.copy).items():
            if name in theirs and not name.endswith("num_batches_tracked"):  # only training uses these
                self._alike.setdefault((mine.dtype, theirs[name].dtype), []).append((mine, theirs[name]))
        self.refresh()

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, K)."""
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype is not None):
            logits: Tensor = self.copy(x if self.dtype is None else x.to(self.dtype))
        return logits

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the network's present weights and statistics."""
        for pairs in self._alike.values():
            torch._foreach_copy_([mine for mine, _ in pairs], [theirs for _, theirs in pairs])
        if self._folds:
            _fold(list(self._folds), list(self._folds.values()))

    def train(self, mode: bool = True) -> FrozenCopy:
        """Do nothing: the copy stays in eval mode."""
        return self

    @staticmethod
    def folds(network: nn.Module, x: Tensor) -> bool:
        """Return whether the batch norms can be folded, by a trial on two of the images ``x`` in double precision.

        They cannot if the network accesses its norms otherwise, or insists on its precision. All weights are perturbed
        before the trial, since zeros in a new network would hide differences.
        """
        try:
            exact, images = copy.deepcopy(network).double().eval(), x[:2].double()
            frozen = FrozenCopy(exact, None, folded=True)
            with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), torch.no_grad():
                for tensor in _tensors(exact).values():
                    if tensor.is_floating_point():
                        tensor += 0.1 * (tensor.abs().mean() + 0.01) * torch.rand_like(tensor)
                frozen.refresh()
                expected, folded = exact(images), frozen(images)
            return bool((folded - expected).abs().max() <= 1e-8 * expected.abs().max().clamp_min(1))
        except Exception:  # an error of the network itself shows at its first step
            return False


def _is_plain(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Return whether this is a plain batch norm with statistics: no subclass, no hooks."""
    if type(module) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return False
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return isinstance(module, _BatchNorm) and module.running_mean is not None and not any(hooks)


class _Affine(nn.Module):
    """A batch norm in eval mode: y = x·scale + shift, channel by channel."""

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        mean = _there(norm.running_mean)
        self.register_buffer("scale", torch.ones_like(mean))
        self.register_buffer("shift", torch.zeros_like(mean))

    def forward(self, x: Tensor) -> Tensor:
        """y like x (n, C, …)."""
        shape = (-1, *(1,) * (x.ndim - 2))
        y = x * self.scale.view(shape) + self.shift.view(shape)
        return y if y.dtype == x.dtype else y.to(x.dtype)


def _fold(norms: Sequence[_BatchNorm], folds: Sequence[_Affine]) -> None:
    """Set scale = weight / √(variance + eps) and shift = bias − mean·scale, for all norms at once."""
    scales, shifts = [fold.scale for fold in folds], [fold.shift for fold in folds]
    torch._foreach_copy_(scales, [_there(norm.running_var) for norm in norms])
    torch._foreach_add_(scales, [norm.eps for norm in norms])
    torch._foreach_rsqrt_(scales)
    if weighted := [(scale, norm.weight) for scale, norm in zip(scales, norms, strict=True) if norm.affine]:
        torch._foreach_mul_([scale for scale, _ in weighted], [weight for _, weight in weighted])
    torch._foreach_copy_(shifts, [_there(norm.running_mean) for norm in norms])
    torch._foreach_mul_(shifts, scales)
    torch._foreach_neg_(shifts)
    if shifted := [(shift, norm.bias) for shift, norm in zip(shifts, norms, strict=True) if norm.affine]:
        torch._foreach_add_([shift for shift, _ in shifted], [bias for _, bias in shifted])


def _there(tensor: Tensor | None) -> Tensor:
    """Return a tensor that is known not to be None."""
    assert tensor is not None
    return tensor


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers under all their names."""
    named = [network.named_parameters(remove_duplicate=False), network.named_buffers(remove_duplicate=False)]
    return {name: tensor for part in named for name, tensor in part}


def cast_layers(network: nn.Module, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Replace the weights of convolutions and linear layers by copies in ``dtype``; return pairs (copy, original)."""
    own: dict[Tensor, nn.Parameter] = {}
    for module in network.modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)):
            for name, p in list(module.named_parameters(recurse=False)):
                if p not in own:  # a weight that two layers share stays one
                    own[p] = nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad)
                setattr(module, name, own[p])
    return [(mine, theirs) for theirs, mine in own.items()]
