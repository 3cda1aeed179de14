"""A trained network back from its folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from bullettrain.models import build


def load(run_or_checkpoint: str | Path, *, weights: str = "last", device: torch.device | str = "cpu") -> nn.Module:
    """The network of a run, in eval mode.

    Args:
        run_or_checkpoint: a run's folder, or one of its .safetensors files.
        weights: of a folder, which: "last", "best" or "averaged".
        device: where to put it.

    Returns:
        A network that takes images (m, C, H, W) in [0, 1] and returns logits (m, K).
    """
    from bullettrain.training.folder import WEIGHTS, RunError, read_weights

    file = Path(run_or_checkpoint)
    if file.is_dir():
        if weights not in WEIGHTS:
            raise RunError(f"there are no weights {weights!r}; there are {', '.join(WEIGHTS)}")
        file = file / f"{weights}.safetensors"
    tensors, about = read_weights(file)
    if "network" not in about:
        raise RunError(f"{file} is no checkpoint of a run: it does not say which network it is of")
    network = build(**about["network"])
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise RunError(f"{file} does not fit its network: {str(error).splitlines()[-1].strip()}") from None
    return network.to(device).eval()
