"""Which precision things are computed in: at least float32, float64 where it was given."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["float32", "tf32", "bf16"]


def at_least_float32(t: Tensor) -> Tensor:
    """Half precision as float32; float32 and float64 as they are."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """float64, except on Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


@contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """Float32 products are exact to float32 unless ``tf32`` is asked for: by default torch convolves in TF32."""
    fast = precision == "tf32"
    # The older switches, which the compiler reads. Torch refuses to read them where a user has set the newer ones.
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
            # The compiler's advice, where TF32 is off on purpose.
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
