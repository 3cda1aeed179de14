"""Normalisation as a layer, so that attacks and their ε stay in the [0, 1] scale of the images."""

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """(x − mean) / std for each channel; (m, C, H, W) in, the same shape out."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not mean:
            raise ValueError(f"mean has {len(mean)} values and std has {len(std)}: give one of each for each channel")
        if not all(isfinite(value) for value in mean):
            raise ValueError(f"mean {tuple(mean)} has values that are not finite")
        if not all(isfinite(value) and value > 0 for value in std):
            raise ValueError(f"std {tuple(std)} must be above zero in every channel")
        # Not persistent: checkpoints hold the names of the bare network, with or without this layer.
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).reshape(1, -1, 1, 1), False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).reshape(1, -1, 1, 1), False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise images x (m, C, H, W)."""
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """Say how many channels are normalised (the values may be on another device, or on none)."""
        return f"channels={self.mean.shape[1]}"


def normalization(mean: Sequence[float] | None, std: Sequence[float] | None, channels: int) -> nn.Module:
    """The first layer of a network of ``channels`` channels: `Normalize`, or nothing where both are None."""
    if mean is None and std is None:
        return nn.Identity()
    if mean is None or std is None:
        raise ValueError("mean and std go together: give both or neither")
    if len(mean) != channels or len(std) != channels:
        raise ValueError(
            f"mean has {len(mean)} values and std has {len(std)}, but images have {channels} channels: "
            "give one value for each channel"
        )
    return Normalize(mean, std)
