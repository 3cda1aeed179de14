"""The four-layer network of the MNIST study."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.models._checks import at_least
from bullettrain.models.normalize import normalization


class SmallCNN(nn.Module):
    """Two strided convolutions (16 and 32 filters of 4×4) and two linear layers (100 hidden); no batch norm.

    Images are square, ``image_size`` pixels a side: the first linear layer is made for that size.
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        channels: int = 1,
        image_size: int = 28,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        at_least(2, num_classes=num_classes)
        at_least(1, channels=channels)
        at_least(4, image_size=image_size)  # each convolution halves it
        self.normalize = normalization(mean, std, channels)
        self.conv1 = nn.Conv2d(channels, 16, 4, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 4, stride=2, padding=1)
        self.fc1 = nn.Linear(32 * (image_size // 4) ** 2, 100)
        self.fc2 = nn.Linear(100, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (m, K) of images x (m, C, H, W) in [0, 1]."""
        # Not in place: YOPO reads the output of the first layer after the pass.
        x = F.relu(self.conv1(self.normalize(x)))
        x = F.relu(self.conv2(x))
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(x)
        return logits
