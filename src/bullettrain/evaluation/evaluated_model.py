"""The network as it is evaluated: on its device, in the precision that is asked for, weights held."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from bullettrain.attacks import frozen
from bullettrain.attacks.state import uncompiled
from bullettrain.config.settings import ConfigError
from bullettrain.data import ImageSet, to_unit
from bullettrain.loading import try_network
from bullettrain.precision import arithmetic, at_least_float32


class EvaluatedModel(nn.Module):
    """Logits (m, K) in float32 of images (m, C, H, W), whatever precision they are computed in.

    Attacks search in that precision; what an image is classified as is decided by :func:`float32_logits`.

    Gradients go to the images alone. However they are asked for, there are two programs to compile, with a gradient
    and without, each for every m.

    Args:
        network: in eval mode.
        dtype: float32, or bfloat16 by autocast, as in training.
        compiled: whether to compile the network.
    """

    def __init__(self, network: nn.Module, *, dtype: torch.dtype = torch.float32, compiled: bool = False) -> None:
        super().__init__()
        self.network: nn.Module = torch.compile(network) if compiled else network  # type: ignore[assignment]
        self.dtype, self.is_compiled = dtype, compiled

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ``x``."""
        if channels_last(x.device) and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        network = self.network
        if self.is_compiled and len(x) == 1:  # it would be a program of its own
            network = uncompiled(network)
        elif self.is_compiled:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        wanted, half = torch.is_grad_enabled() and x.requires_grad, self.dtype != torch.float32
        with torch.set_grad_enabled(wanted), torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            logits: Tensor = network(x)
        return at_least_float32(logits) if torch.is_tensor(logits) else logits

    @property
    def exact(self) -> nn.Module:
        """The same network, not compiled and not in half precision."""
        return EvaluatedModel(uncompiled(self.network))


def float32_logits(model: nn.Module, x: Tensor) -> Tensor:
    """Logits (m, K) of x (m, C, H, W) in eval mode, that decide what x is classified as: in real float32."""
    exactly = arithmetic("float32") if isinstance(model, EvaluatedModel) else nullcontext()
    model = model.exact if isinstance(model, EvaluatedModel) else model
    with frozen(model), torch.no_grad(), exactly:
        logits: Tensor = model(x)
    return logits


def is_right(logits: Tensor, y: Tensor) -> Tensor:
    """(m,) bool: whether logits (m, K) say y (m,)."""
    return (logits.argmax(dim=1) == y) & logits.isfinite().all(dim=1)  # argmax takes NaN for the largest


def correct(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """(m,) bool: which of x (m, C, H, W) the network, in eval mode, classifies as y (m,); NaN is no answer."""
    return is_right(float32_logits(model, x), y)


def channels_last(device: torch.device) -> bool:
    """Whether images lie channels last in memory: what GPUs convolve fastest."""
    return device.type == "cuda"


def prepare(network: nn.Module, images: ImageSet, *, device: torch.device, data: str) -> nn.Module:
    """``network`` on its device, in eval mode, without gradients for its weights, tried on two of ``images``.

    Raises:
        ConfigError: it does not go with the dataset, which is called ``data``.
    """
    network = network.to(device).eval().requires_grad_(False)
    if channels_last(device):
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = to_unit(images.images[:2].to(device), channels_last=channels_last(device))
    logits = try_network(network, x, f"the images of {data}")
    if logits.shape[1] != len(images.classes):
        raise ConfigError(
            f"the network has {logits.shape[1]} classes, but {data} has {len(images.classes)}; "
            "give the dataset that it was trained on with --data"
        )
    if not torch.isfinite(logits).all():
        raise ConfigError("the network returns NaN or infinite logits; look at its weights")
    return network
