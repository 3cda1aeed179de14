"""Base classes that the networks share."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.models.normalize import normalization
from bullettrain.validation import check_count


class ImageNetwork(nn.Module):
    """Base class of the networks: checks their sizes and normalises images in the layer ``normalize``."""

    def __init__(
        self, num_classes: int, channels: int, mean: Sequence[float] | None, std: Sequence[float] | None
    ) -> None:
        super().__init__()
        check_count(num_classes, "num_classes", least=2)
        check_count(channels, "channels", least=1)
        self.normalize = normalization(mean, std, channels)


class PreActBlock(nn.Module):
    """Batch norm, ReLU and 3×3 convolution, twice, plus a shortcut; (m, in, H, W) → (m, out, H/s, W/s).

    The shortcut is the input itself or, if the block changes the number of filters, a 1×1 convolution of the activated
    input. Subclasses store that convolution under its name in published checkpoints.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)

    def features(self, x: Tensor, shortcut: nn.Module | None) -> Tensor:
        """Return the features after the block; ``shortcut`` is None where the input is added unchanged."""
        active = F.relu(self.bn1(x))
        residual: Tensor = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return residual + (x if shortcut is None else shortcut(active))
