"""Weights files: safetensors with metadata and a digest of both."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bullettrain.config.method import Threat
from bullettrain.errors import UserError, raised_as
from bullettrain.extras import extra
from bullettrain.schema import conform

WEIGHTS = ("last", "best", "averaged")


class RunError(UserError):
    """A run folder or weights file cannot be used. The message says why, and what to do."""


@dataclass(frozen=True)
class NetworkMetadata:
    """Arguments of :func:`bullettrain.models.build` for the network of a weights file."""

    name: str
    num_classes: int
    channels: int
    image_size: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Metadata:
    """Metadata of a weights file."""

    step: int = 0
    epoch: int = 0
    network: NetworkMetadata | None = None
    """None if the file was not written by a run."""
    classes: tuple[str, ...] = ()
    recipe: str = ""
    threat: Threat | None = None


class Weights(NamedTuple):
    """A network's tensors and their metadata."""

    tensors: Mapping[str, Tensor]
    about: Metadata


def preferred(names: Container[str]) -> str:
    """Return the preferred ones of a run's weights: "best", which needs a validation set, or else "last"."""
    return "best" if "best" in names else "last"


def weights_in(path: Path) -> list[str]:
    """List the weights in a run's folder."""
    return [name for name in WEIGHTS if (path / f"{name}.safetensors").is_file()]


def pack_weights(tensors: Mapping[str, Tensor], about: Metadata) -> bytes:
    """Return the bytes of a safetensors file with ``about`` and a digest in its metadata."""
    with extra("a checkpoint"):
        from safetensors.torch import save
    tensors = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    values = dataclasses.asdict(about)
    values["digest"] = _digest(values, tensors)
    packed: bytes = save(tensors, metadata={"bullettrain": json.dumps(values)})  # one key: the order of several varies
    return packed


def read_weights(file: Path) -> tuple[dict[str, Tensor], Metadata]:
    """Read the tensors and metadata of a safetensors file. Nothing that it names is imported.

    Raises:
        RunError: the file is missing or damaged.
    """
    with extra("a checkpoint"):
        from safetensors import safe_open
    if not file.is_file():
        raise RunError(f"{file} is missing")
    again = f"delete it, and `bullettrain train {file.parent} --resume` writes it again"
    mend = again if (file.parent / "checkpoint.pt").is_file() else "copy it again from where it was made"
    # Safetensors' own error type derives from Exception.
    with raised_as(RunError, f"{file} is damaged: {{error}}; {mend}", Exception):
        with safe_open(str(file), framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
            values = json.loads((opened.metadata() or {}).get("bullettrain", "{}"))
        digest = values.pop("digest", "")  # older files and those of others have none
        if digest not in ("", _digest(values, tensors)):
            raise ValueError("its digest does not match")
        return tensors, conform(values, Metadata)


def _digest(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    return hash_tensors(hashlib.sha256(json.dumps(about).encode()), sorted(tensors.items()))


def hash_tensors(digest: hashlib._Hash | hashlib.blake2b, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Add named tensors to a hash, and return its hexadecimal digest."""
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
