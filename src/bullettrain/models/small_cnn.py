"""The four-layer network of the paper's MNIST experiment."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.models.layers import ImageNetwork
from bullettrain.validation import check_count


class SmallCNN(ImageNetwork):
    """Two strided 4×4 convolutions (16 and 32 filters) and two linear layers (100 hidden units); no batch norm.

    Images are square. The size of the first linear layer follows from ``image_size``, their side in pixels.
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
        super().__init__(num_classes, channels, mean, std)
        check_count(image_size, "image_size", least=4)  # each convolution halves it
        self.conv1 = nn.Conv2d(channels, 16, 4, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 4, stride=2, padding=1)
        self.fc1 = nn.Linear(32 * (image_size // 4) ** 2, 100)
        self.fc2 = nn.Linear(100, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (m, K) for images x (m, C, H, W) in [0, 1]."""
        # Not in place: YOPO reads the output of the first layer after the forward pass.
        x = F.relu(self.conv1(self.normalize(x)))
        x = F.relu(self.conv2(x))
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(x)
        return logits
