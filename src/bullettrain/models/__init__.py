"""Networks for images in [0, 1]: logits (m, K) from (m, C, H, W), normalisation inside."""

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
"""Names that `build` knows; of the wide ones, examples: any wrn-D-W of a right depth D will do."""


def build(
    name: str,
    *,
    num_classes: int = 10,
    channels: int = 3,
    image_size: int = 32,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> nn.Module:
    """The network called ``name``, freshly initialised: "small-cnn", "preact-resnet-18" or "wrn-D-W".

    "package.module:function" is what that function, called without arguments, returns; "timm:NAME" is timm's. ``mean``
    and ``std``, one value for each channel, put a `Normalize` in front. Of our own only the small CNN depends on
    ``image_size``; the others take images of any size.
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
    there = "there are small-cnn, preact-resnet-18 and wrn-D-W (depth D, width W), such as wrn-34-10"
    raise ValueError(f"no network is called {name!r}{instead(name, NETWORKS, there)}")
