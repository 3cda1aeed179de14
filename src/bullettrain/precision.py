"""Which precision things are computed in: at least float32, float64 where it was given."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(t: Tensor) -> Tensor:
    """Half precision as float32; float32 and float64 as they are."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def widest(device: torch.device) -> torch.dtype:
    """float64, except on Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64
