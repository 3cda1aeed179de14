"""A trained network back from its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from bullettrain.models import build
from bullettrain.models.called import is_foreign


def load(
    run_or_checkpoint: str | Path,
    *,
    weights: str | None = None,
    device: torch.device | str = "cpu",
    trust: bool = False,
) -> nn.Module:
    """The network of a run, in eval mode.

    Args:
        run_or_checkpoint: a run's folder, or one of its .safetensors files.
        weights: of a folder, which: "last", "best" or "averaged". None: the best on the run's validation set where it
            held one out, else the last. A file is what it is, and takes none.
        device: where to put it.
        trust: import and call the function that the file names, where its network is not one of this package's.

    Returns:
        A network that takes images (m, C, H, W) in [0, 1] and returns logits (m, K).
    """
    from bullettrain.training.folder import RunError, read_weights
    from bullettrain.training.named import rather, weights_file

    file = weights_file(Path(run_or_checkpoint), weights)
    tensors, about = read_weights(file)
    if "network" not in about:
        holds = _some("it holds", list(tensors)) or "it holds no tensors"
        raise RunError(f"{file} is no checkpoint of a run: {holds}, and does not say of which network; {rather(file)}")
    name = str(about["network"].get("name"))
    if is_foreign(name) and not trust:
        raise RunError(f"{file} is of {name}, which is code of yours; load(…, trust=True) imports and calls it")
    try:
        network = build(**about["network"])
    except ValueError as error:
        raise RunError(f"{file} cannot be loaded: {error}") from None
    try:
        network.load_state_dict(tensors)
    except RuntimeError:
        raise RunError(f"{file} does not fit its network: {misfit(network, tensors)}") from None
    return network.to(device).eval()


def misfit(network: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """Which keys of a state_dict do not fit: missing, unknown, of another shape."""
    own = network.state_dict()
    shapes = [
        f"{key} is {tuple(tensors[key].shape)} there and {tuple(own[key].shape)} in the network"
        for key in own
        if key in tensors and own[key].shape != tensors[key].shape
    ]
    parts = [
        _some("it lacks", [key for key in own if key not in tensors]),
        _some("it has besides", [key for key in tensors if key not in own]),
        _some("", shapes, 2),
    ]
    return "; ".join(part for part in parts if part)


def _some(what: str, keys: Sequence[str], most: int = 3) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return f"{what} {', '.join(keys[:most])}{more}".strip() if keys else ""
