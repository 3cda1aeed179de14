"""Precision: at least float32, and float64 where the input is float64."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["float32", "tf32", "bf16"]


def at_least_float32(t: Tensor) -> Tensor:
    """Return half precision as float32; float32 and float64 unchanged."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """Compute float32 products in full float32 unless ``tf32`` is requested; torch convolves in TF32 by default."""
    fast = precision == "tf32"
    # The compiler reads the older switches. Torch refuses to read them once the newer ones have been set.
    try:
        old = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:
        with _newer("tf32" if fast else "ieee"):
            yield
        return
    try:
        torch.backends.cudnn.allow_tf32 = fast
        torch.set_float32_matmul_precision("high" if fast else "highest")
        with warnings.catch_warnings():
            # The compiler advises TF32, which is disabled on purpose.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = old[0]
        torch.set_float32_matmul_precision(old[1])


@contextmanager
def _newer(precision: str) -> Iterator[None]:
    switches: list[Any] = [torch.backends.cudnn.conv, torch.backends.cuda.matmul]  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = precision
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value
