"""WideResNet(depth, width) for small images, with the parameter names of RobustBench checkpoints."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.models.layers import ImageNetwork, PreActBlock
from bullettrain.validation import check_count


class _Block(PreActBlock):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, stride)
        self.convShortcut: nn.Conv2d | None = None
        if inputs != outputs:
            self.convShortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x, self.convShortcut)


class WideResNet(ImageNetwork):
    """WRN-depth-width: three stages of (depth − 4) / 6 blocks with 16·width, 32·width and 64·width filters.

    Designed for 32×32 images; takes any size. Loads RobustBench checkpoints, including the one of the TRADES authors.
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
        super().__init__(num_classes, channels, mean, std)
        _check_depth(depth)
        check_count(width, "width", least=1)
        blocks = (depth - 4) // 6
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
        """Return logits (m, K) for images x (m, C, H, W) in [0, 1]."""
        x = self.conv1(self.normalize(x))
        x = self.block3(self.block2(self.block1(x)))
        x = F.relu(self.bn1(x))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def _stage(blocks: int, inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    first = _Block(inputs, outputs, stride)
    rest = [_Block(outputs, outputs, 1) for _ in range(blocks - 1)]
    # Nested for the names in checkpoints: block1.layer.0
    return nn.Sequential(OrderedDict(layer=nn.Sequential(first, *rest)))


def _check_depth(depth: int) -> None:
    check_count(depth, "depth", least=1)
    if depth >= 10 and depth % 6 == 4:
        return
    below = (depth - 4) // 6 * 6 + 4
    nearest = "10" if depth < 10 else f"{below} or {below + 6}"
    raise ValueError(f"depth {depth} is not 6n + 4 with n of at least 1: take {nearest}")


def _drop_sub_block1(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Ignore the weights of a stage that the TRADES authors' network creates but never runs."""
    for key in [key for key in state_dict if key.startswith(f"{prefix}sub_block1.")]:
        del state_dict[key]
