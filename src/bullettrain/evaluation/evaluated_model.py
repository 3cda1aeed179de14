"""The network as it is judged: on its device, in the precision that is asked for, weights held."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from bullettrain.attacks import frozen
from bullettrain.attacks.state import uncompiled
from bullettrain.brief import first_line
from bullettrain.checks import check_logits_shape
from bullettrain.config.settings import ConfigError
from bullettrain.data import ImageSet, to_unit
from bullettrain.precision import arithmetic, wide


class EvaluatedModel(nn.Module):
    """Logits (m, K) in float32 of images (m, C, H, W), whatever precision they are computed in.

    Attacks look for images in that precision; what an image is taken for is said by :func:`float32_logits`, in float32.

    Gradients go to the images alone. However they are asked for, there are two programs to compile, with a gradient
    and without, each for every m.
    """

    def __init__(self, network: nn.Module, *, half: bool, compiled: bool = False) -> None:
        super().__init__()
        self.network: nn.Module = torch.compile(network) if compiled else network  # type: ignore[assignment]
        self.in_half, self.is_compiled = half, compiled

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ``x``; half precision is autocast, as in training."""
        if channels_last(x.device) and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        network = self.network
        if self.is_compiled and len(x) == 1:  # it would be a program of its own
            network = uncompiled(network)
        elif self.is_compiled:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        wanted = torch.is_grad_enabled() and x.requires_grad
        with torch.set_grad_enabled(wanted), torch.autocast(x.device.type, torch.bfloat16, enabled=self.in_half):
            logits: Tensor = network(x)
        return wide(logits) if torch.is_tensor(logits) else logits

    @property
    def exact(self) -> nn.Module:
        """The same network, not compiled and not in half precision: within ``arithmetic("float32")`` it judges."""
        return EvaluatedModel(uncompiled(self.network), half=False)


def float32_logits(model: nn.Module, x: Tensor) -> Tensor:
    """Logits (m, K) of x (m, C, H, W) in eval mode, that decide what x is classified as: in real float32."""
    judge, exactly = (
        (model.exact, arithmetic("float32")) if isinstance(model, EvaluatedModel) else (model, nullcontext())
    )
    with frozen(judge), torch.no_grad(), exactly:
        logits: Tensor = judge(x)
    return logits


def channels_last(device: torch.device) -> bool:
    """Whether images lie channels last in memory: what GPUs convolve fastest."""
    return device.type == "cuda"


def ready(network: nn.Module, images: ImageSet, *, device: torch.device, data: str) -> nn.Module:
    """``network`` on its device, tried on two images: ConfigError where it does not go with the dataset."""
    network = network.to(device).eval().requires_grad_(False)
    if channels_last(device):
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = to_unit(images.images[:2].to(device), channels_last=channels_last(device))
    shape = "×".join(str(side) for side in x.shape[1:])
    try:
        with frozen(network), torch.no_grad():
            logits = network(x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        line = first_line(error)
        raise ConfigError(f"the network does not take the images of {data}, {shape}: {line}") from None
    try:
        check_logits_shape(logits, len(x))
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None
    if logits.shape[1] != len(images.classes):
        raise ConfigError(
            f"the network has {logits.shape[1]} classes, but {data} has {len(images.classes)}; "
            "give the dataset that it was trained on with --data"
        )
    if not torch.isfinite(logits).all():
        raise ConfigError("the network returns NaN or infinite logits; look at its weights")
    return network
