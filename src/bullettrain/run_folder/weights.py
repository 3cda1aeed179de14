"""Weights as users take them: a safetensors file that says what it is of, with a digest of both."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bullettrain.brief import first_line
from bullettrain.config.method import Threat
from bullettrain.errors import UserError
from bullettrain.extras import extra
from bullettrain.schema import conform

WEIGHTS = ("last", "best", "averaged")


class RunError(UserError):
    """A run folder that cannot be used as asked: one sentence that says why and what to do."""


@dataclass(frozen=True)
class NetworkMetadata:
    """How the network of a weights file is built; see :func:`bullettrain.models.build`."""

    name: str
    num_classes: int
    channels: int
    image_size: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Metadata:
    """What a weights file says about itself, beside its tensors."""

    step: int = 0
    epoch: int = 0
    network: NetworkMetadata | None = None
    """None: the file is not of a run."""
    classes: tuple[str, ...] = ()
    recipe: str = ""
    threat: Threat | None = None


class Weights(NamedTuple):
    """A network's tensors, and what they are of."""

    tensors: Mapping[str, Tensor]
    about: Metadata


def preferred(names: Container[str]) -> str:
    """Which of a run's weights a user would take: the best on its validation set where there are any, else the last."""
    return "best" if "best" in names else "last"


def weights_in(path: Path) -> list[str]:
    """The weights that lie in a run's folder."""
    return [name for name in WEIGHTS if (path / f"{name}.safetensors").is_file()]


def pack_weights(tensors: Mapping[str, Tensor], about: Metadata) -> bytes:
    """The bytes of a safetensors file: the tensors, and ``about`` as JSON in its metadata, with the digest of both."""
    with extra("a checkpoint"):
        from safetensors.torch import save
    tensors = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    values = dataclasses.asdict(about)
    values["digest"] = _digest(values, tensors)
    packed: bytes = save(tensors, metadata={"bullettrain": json.dumps(values)})  # one key: several have no order
    return packed


def read_weights(file: Path) -> tuple[dict[str, Tensor], Metadata]:
    """Tensors of a safetensors file, and what is written about them; nothing that it names is imported.

    Raises:
        RunError: it is missing or damaged.
    """
    with extra("a checkpoint"):
        from safetensors import safe_open
    if not file.is_file():
        raise RunError(f"{file} is missing")
    try:
        with safe_open(str(file), framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
            values = json.loads((opened.metadata() or {}).get("bullettrain", "{}"))
        if values.pop("digest", "") not in ("", _digest(values, tensors)):  # older and foreign files have none
            raise ValueError("its digest does not match")
        return tensors, conform(values, Metadata)
    except Exception as error:  # safetensors' own error type derives from Exception
        again = f"; delete it, and `bullettrain train {file.parent} --resume` writes it again"
        mend = again if (file.parent / "checkpoint.pt").is_file() else "; copy it again from where it was made"
        raise RunError(f"{file} is damaged: {first_line(error)}{mend}") from None


def _digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(json.dumps(about).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
