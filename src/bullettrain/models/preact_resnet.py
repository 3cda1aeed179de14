"""PreActResNet-18 for small images, with the parameter names of RobustBench checkpoints."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.models.layers import ImageNetwork, PreActBlock


class _Block(PreActBlock):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, stride)
        self.shortcut: nn.Sequential | None = None
        if inputs != outputs:
            # A sequence of one convolution, for its name in checkpoints: shortcut.0
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x, self.shortcut)


class PreActResNet18(ImageNetwork):
    """Four stages of two pre-activation blocks with 64 to 512 filters; designed for 32×32 images, takes any size."""

    def __init__(
        self,
        *,
        num_classes: int = 10,
        channels: int = 3,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__(num_classes, channels, mean, std)
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.layer1 = _stage(64, 64, stride=1)
        self.layer2 = _stage(64, 128, stride=2)
        self.layer3 = _stage(128, 256, stride=2)
        self.layer4 = _stage(256, 512, stride=2)
        self.bn = nn.BatchNorm2d(512)
        self.linear = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (m, K) for images x (m, C, H, W) in [0, 1]."""
        x = self.conv1(self.normalize(x))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = F.relu(self.bn(x))
        logits: Tensor = self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def _stage(inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(_Block(inputs, outputs, stride), _Block(outputs, outputs, 1))
