"""The network as an attack sees it: in the mode that is asked for, weights held, everything put back after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from bullettrain.validation import buffers_restored_on_error

Mode = Literal["eval", "train"]


def check_mode(mode: Mode, name: str) -> Mode:
    """``mode``, if there is such a one."""
    if mode not in ("eval", "train"):
        raise ValueError(f"{name} is {mode!r}; a network is in 'eval' or 'train' mode")
    return mode


@contextmanager
def frozen(model: nn.Module, mode: Mode = "eval") -> Iterator[None]:
    """Hold the network still: its modules in ``mode``, no gradient for weights, no statistic changed.

    On leaving, also by an exception, each module's mode, each parameter's ``requires_grad`` and each buffer
    are what they were. Weights without gradient also keep autocast from caching casts that have none.
    """
    check_mode(mode, "mode")
    training = [(module, module.training) for module in model.modules()]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # In training mode batch norm writes its statistics: it gets copies, and the originals never change.
    buffers = [
        (module._buffers, name, buffer)
        for module, _ in training
        for name, buffer in module._buffers.items()
        if mode == "train" and buffer is not None
    ]
    try:
        if mode == "eval" or not model.training:  # a network in training mode keeps the modes of its parts
            model.train(mode == "train")
        for parameter in learning:
            parameter.requires_grad_(False)
        for owner, name, buffer in buffers:
            owner[name] = buffer.clone()
        with without_sync(model):
            yield
    finally:
        for owner, name, buffer in buffers:
            owner[name] = buffer
        for parameter in learning:
            parameter.requires_grad_(True)
        for module, was in training:
            module.training = was


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """The network in training mode. One that is in training mode keeps the modes of its parts (frozen norms)."""
    if model.training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, was in modes:
            module.training = was


@contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Forwards that other processes may not make: a DistributedDataParallel inside the model does not wait for them."""
    wrapped = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
    flags = ("require_backward_grad_sync", "require_forward_param_sync")
    before = [[getattr(module, flag) for flag in flags] for module in wrapped]
    try:
        for module in wrapped:
            for flag in flags:
                setattr(module, flag, False)
        yield
    finally:
        for module, values in zip(wrapped, before, strict=True):
            for flag, value in zip(flags, values, strict=True):
                setattr(module, flag, value)


def forward_some(model: nn.Module, x: Tensor) -> Tensor:
    """Logits (n, K) of a part of a batch, in the mode that the network is in.

    One example alone has no statistics over 1×1 maps, and a batch norm in training mode refuses it there. How
    many examples are left is the method's doing, not the user's: such an example is normalised by the running
    statistics, by every batch norm, and changes none.
    """
    if len(x) > 1:
        return model(x)  # type: ignore[no-any-return]
    try:
        with buffers_restored_on_error(model):
            return model(x)  # type: ignore[no-any-return]
    except Exception as error:  # a compiled network wraps the ValueError in an error of its own
        if "more than 1 value per channel" not in str(error):
            raise
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    for norm in norms:
        norm.eval()
    try:
        return model(x)  # type: ignore[no-any-return]
    finally:
        for norm in norms:
            norm.train()


def bare(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, or the model itself.

    Attacks differ in length from worker to worker, so they must not wait for each other's gradients. Of a
    compiled wrapper this is the uncompiled module: compile first, then wrap, to attack compiled code.
    """
    inner = getattr(model, "_orig_mod", model)  # a compiled wrapper around DistributedDataParallel
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        module = inner.module
        assert isinstance(module, nn.Module)
        return module
    return model


def uncompiled(model: nn.Module) -> nn.Module:
    """The plain module inside all wrappers: compiled code calls no hooks of its parts, and has no second gradient."""
    inner = bare(model)
    plain: nn.Module = getattr(inner, "_orig_mod", inner)
    return plain


def underflows(device: torch.device) -> bool:
    """Whether autocast runs in float16 here, whose small gradients round to 0."""
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16


def dynamic(x: Tensor, dim: int = 0) -> Tensor:
    """Tell the compiler that the batch's size varies; without compilation this does nothing."""
    if x.is_cuda:
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x
