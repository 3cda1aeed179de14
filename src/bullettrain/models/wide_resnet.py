"""WideResNet(depth, width) for small images, with the parameter names of RobustBench checkpoints."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.models._checks import at_least
from bullettrain.models.normalize import normalization


class WideBlock(nn.Module):
    """Batch norm, ReLU and 3×3 convolution, twice, beside a shortcut; (m, in, H, W) → (m, out, H/s, W/s)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.convShortcut: nn.Conv2d | None = None
        if inputs != outputs:  # every strided block widens too
            self.convShortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Features after the block; the shortcut is convolved from the activated input, or is the input."""
        active = F.relu(self.bn1(x))
        residual: Tensor = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return residual + (x if self.convShortcut is None else self.convShortcut(active))


class WideResNet(nn.Module):
    """WRN-depth-width: a stem and three stages of (depth − 4) / 6 blocks, 16·width to 64·width filters.

    Images of any size, made for 32×32. Checkpoints of RobustBench, TRADES' own among them, load as they are.
    """

    def __init__(
        self,
        depth: int,
        width: int,
        *,
        num_classes: int = 10,
        channels: int = 3,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        _check_depth(depth)
        at_least(1, width=width, channels=channels)
        at_least(2, num_classes=num_classes)
        blocks = (depth - 4) // 6
        self.normalize = normalization(mean, std, channels)
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.block1 = _stage(blocks, 16, 16 * width, stride=1)
        self.block2 = _stage(blocks, 16 * width, 32 * width, stride=2)
        self.block3 = _stage(blocks, 32 * width, 64 * width, stride=2)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)
        self.register_load_state_dict_pre_hook(_drop_sub_block1)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """Logits (m, K) of images x (m, C, H, W) in [0, 1]."""
        x = self.conv1(self.normalize(x))
        x = self.block3(self.block2(self.block1(x)))
        x = F.relu(self.bn1(x))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def _stage(blocks: int, inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    first = WideBlock(inputs, outputs, stride)
    rest = [WideBlock(outputs, outputs, 1) for _ in range(blocks - 1)]
    # One level more than needed, for the names in checkpoints: block1.layer.0
    return nn.Sequential(OrderedDict(layer=nn.Sequential(first, *rest)))


def _check_depth(depth: int) -> None:
    at_least(1, depth=depth)
    if depth >= 10 and depth % 6 == 4:
        return
    below = (depth - 4) // 6 * 6 + 4
    nearest = "10" if depth < 10 else f"{below} or {below + 6}"
    raise ValueError(f"depth {depth} is not 6n + 4 with n of at least 1: take {nearest}")


def _drop_sub_block1(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    # The TRADES authors' network made a stage that it never ran; its weights are in their checkpoint.
    for key in [key for key in state_dict if key.startswith(f"{prefix}sub_block1.")]:
        del state_dict[key]
