"""Conversion to and from HSV, equal bit for bit to scikit-image."""

from __future__ import annotations

import torch
from torch import Tensor

from bullettrain.corruptions.filters import divide


def to_hsv(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hue, saturation and value, each (…) in [0, 1], of x (…, 3)."""
    red, green, blue = x.unbind(-1)
    value = x.amax(-1)
    spread = value - x.amin(-1)
    grey = spread == 0
    over = spread.masked_fill(grey, 1)
    hue = (green - blue) / over
    hue = torch.where(green == value, (blue - red) / over + 2, hue)
    hue = torch.where(blue == value, (red - green) / over + 4, hue)
    hue = divide(hue, 6).remainder_(1).masked_fill_(grey, 0)
    return hue, spread / value.masked_fill(grey, 1), value


def from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Return the RGB colours (…, 3) of hue, saturation and value, each (…)."""
    sector = (hue * 6).floor()
    f = hue * 6 - sector
    p = value * (1 - saturation)
    q = value * (1 - f * saturation)
    t = value * (1 - (1 - f) * saturation)
    table = torch.stack((value, t, p, q), -1)
    # Indices into (value, t, p, q) of red, green and blue, for each of the six sectors.
    picks = torch.tensor([[0, 1, 2], [3, 0, 2], [2, 0, 1], [2, 3, 0], [1, 2, 0], [0, 2, 3]], device=hue.device)
    return table.gather(-1, picks[sector.long() % 6])
