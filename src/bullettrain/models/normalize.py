"""Normalisation as a layer, so that attacks and ε stay in the [0, 1] range of the images."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bullettrain.validation import check_number


class Normalize(nn.Module):
    """Compute (x − mean) / std per channel, for images (m, C, H, W)."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], channels: int | None = None) -> None:
        super().__init__()
        if not len(mean) == len(std) == (channels or len(mean) or 1):
            images = f", but images have {channels} channels" if channels else ""
            raise ValueError(f"mean has {len(mean)} values and std has {len(std)}{images}: give one for each channel")
        for middle, width in zip(mean, std, strict=True):
            check_number(middle, "mean")
            check_number(width, "std", above=0)
        # Not persistent, so that checkpoints have the same names with and without this layer.
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).reshape(1, -1, 1, 1), False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).reshape(1, -1, 1, 1), False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise images x (m, C, H, W)."""
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """Return the number of channels; reading the values would synchronise with the device."""
        return f"channels={self.mean.shape[1]}"


def normalization(mean: Sequence[float] | None, std: Sequence[float] | None, channels: int | None = None) -> nn.Module:
    """Return `Normalize`, or `nn.Identity` if both are None; ``channels`` is the expected number of values."""
    if mean is None and std is None:
        return nn.Identity()
    if mean is None or std is None:
        raise ValueError("mean and std go together: give both or neither")
    return Normalize(mean, std, channels)
