"""Networks that take images (m, C, H, W) in [0, 1], normalise them, and return logits (m, K)."""

import re
from collections.abc import Sequence

from torch import nn

from bullettrain.models.external import build_external, is_external
from bullettrain.models.normalize import Normalize
from bullettrain.models.preact_resnet import PreActResNet18
from bullettrain.models.small_cnn import SmallCNN
from bullettrain.models.wide_resnet import WideResNet
from bullettrain.validation import instead

__all__ = ["NETWORKS", "Normalize", "PreActResNet18", "SmallCNN", "WideResNet", "build"]

NETWORKS = ("small-cnn", "preact-resnet-18", "wrn-28-10", "wrn-34-10", "wrn-40-2")
"""Names for `build`. Any wrn-D-W with a depth D of the form 6n + 4 works; these are examples."""


def build(
    name: str,
    *,
    num_classes: int = 10,
    channels: int = 3,
    image_size: int = 32,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> nn.Module:
    """Build a randomly initialised network.

    Args:
        name: "small-cnn", "preact-resnet-18" or "wrn-D-W" (depth D, width W); "timm:NAME" for a network of timm;
            "package.module:function" for the network that this function returns when called without arguments.
        num_classes: number of logits.
        channels: number of image channels.
        image_size: side of the images in pixels; only "small-cnn" depends on it.
        mean: one value per channel for a `Normalize` in front; None for no normalisation.
        std: likewise; give both or neither.

    Raises:
        ValueError: there is no such network, or a size is wrong.
    """
    if is_external(name):
        return build_external(name, num_classes=num_classes, channels=channels, mean=mean, std=std)
    if name == "small-cnn":
        return SmallCNN(num_classes=num_classes, channels=channels, image_size=image_size, mean=mean, std=std)
    if name == "preact-resnet-18":
        return PreActResNet18(num_classes=num_classes, channels=channels, mean=mean, std=std)
    if wide := re.fullmatch(r"wrn-([0-9]{1,4})-([0-9]{1,4})", name):
        depth, width = int(wide[1]), int(wide[2])
        return WideResNet(depth, width, num_classes=num_classes, channels=channels, mean=mean, std=std)
    known = "there are small-cnn, preact-resnet-18 and wrn-D-W (depth D, width W), such as wrn-34-10"
    raise ValueError(f"no network is called {name!r}{instead(name, NETWORKS, known)}")
