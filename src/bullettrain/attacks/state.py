"""The state of a network during an attack: its mode, frozen weights, and restoring everything afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from bullettrain.validation import buffers_restored_on_error, check_known

Mode = Literal["eval", "train"]


@contextmanager
def frozen(model: nn.Module, mode: Mode = "eval") -> Iterator[None]:
    """Freeze the network: modules in ``mode``, and no gradients for weights.

    On exit, also by an exception, the mode of each module and ``requires_grad`` of each parameter are restored; with
    ``mode="train"`` also all buffers, which a forward in eval mode is expected to leave alone. Without gradients for
    weights autocast also does not cache casts that have none.
    """
    check_known(mode, get_args(Mode), "mode is")
    training = [(module, module.training) for module in model.modules()]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # In training mode batch norms update copies of their statistics.
    buffers = [
        (module._buffers, name, buffer)
        for module, _ in training
        for name, buffer in module._buffers.items()
        if mode == "train" and buffer is not None
    ]
    try:
        if mode == "eval" or not in_training(model):  # a network in training mode keeps the modes of its modules
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
    """Put the network into training mode. If it already is, its modules keep their modes (frozen norms)."""
    if in_training(model):
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
    """Disable the synchronisation of DistributedDataParallel, for forwards that other processes may not make."""
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
    """Return logits (n, K) of part of a batch, in the present mode of the network.

    A batch norm in training mode refuses a single example with 1×1 feature maps. The method, not the user, decides how
    many examples remain, so a single example is then normalised by the running statistics in all batch norms.
    """
    if len(x) > 1:
        return model(x)  # type: ignore[no-any-return]
    try:
        with buffers_restored_on_error(model):
            return model(x)  # type: ignore[no-any-return]
    except Exception as error:  # a compiled network wraps the ValueError
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
    """Return the module inside DistributedDataParallel, or the model itself.

    Attacks differ in length from process to process, so they must not synchronise. For a compiled wrapper this is the
    uncompiled module: compile first, then wrap, to attack compiled code.
    """
    inner = getattr(model, "_orig_mod", model)  # a compiled wrapper around DistributedDataParallel
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        module = inner.module
        assert isinstance(module, nn.Module)
        return module
    return model


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the plain module inside all wrappers: compiled code has no module hooks and no second derivatives."""
    inner = bare(model)
    plain: nn.Module = getattr(inner, "_orig_mod", inner)
    return plain


def in_training(model: nn.Module) -> bool:
    """Return whether the network is in training mode: `net.eval()` leaves the flags of wrappers around it."""
    inner = uncompiled(model)
    return (inner.module if isinstance(inner, nn.DataParallel) else inner).training


def underflows(device: torch.device) -> bool:
    """Return whether autocast runs in float16 here, in which small gradients become 0."""
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16


def dynamic(x: Tensor, dim: int = 0) -> Tensor:
    """Mark the batch dimension as dynamic for the compiler."""
    if x.is_cuda:
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x
