"""PreActResNet-18 for small images, with the parameter names of RobustBench checkpoints."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.models._checks import at_least
from bullettrain.models.normalize import normalization


class PreActBlock(nn.Module):
    """Batch norm, ReLU and 3×3 convolution, twice, beside a shortcut; (m, in, H, W) → (m, out, H/s, W/s)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            # A sequence of one, for its name in checkpoints: shortcut.0
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Features after the block; the shortcut is convolved from the activated input, or is the input."""
        active = F.relu(self.bn1(x))
        residual: Tensor = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return residual + (x if self.shortcut is None else self.shortcut(active))


class PreActResNet18(nn.Module):
    """Four stages of two pre-activation blocks, 64 to 512 filters; images of any size, made for 32×32."""

    def __init__(
        self,
        *,
        num_classes: int = 10,
        channels: int = 3,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        at_least(2, num_classes=num_classes)
        at_least(1, channels=channels)
        self.normalize = normalization(mean, std, channels)
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.layer1 = _stage(64, 64, stride=1)
        self.layer2 = _stage(64, 128, stride=2)
        self.layer3 = _stage(128, 256, stride=2)
        self.layer4 = _stage(256, 512, stride=2)
        self.bn = nn.BatchNorm2d(512)
        self.linear = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (m, K) of images x (m, C, H, W) in [0, 1]."""
        x = self.conv1(self.normalize(x))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = F.relu(self.bn(x))
        logits: Tensor = self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def _stage(inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(PreActBlock(inputs, outputs, stride), PreActBlock(outputs, outputs, 1))
