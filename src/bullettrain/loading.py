"""A trained network back from its folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bullettrain.models import build
from bullettrain.models.external import is_external

if TYPE_CHECKING:
    from bullettrain.run_folder import Metadata


def load(
    run_or_checkpoint: str | Path,
    *,
    weights: str | None = None,
    device: torch.device | str = "cpu",
    network: str | None = None,
    trust: bool = False,
) -> nn.Module:
    """The network of a run, in eval mode.

    Args:
        run_or_checkpoint: a run's folder, or one of its .safetensors files.
        weights: of a folder, which: "last", "best" or "averaged". None: the best on the run's validation set where it
            held one out, else the last. A file is what it is, and takes none.
        device: where to put it.
        network: the network to build, instead of the one that the file names: a name of `bullettrain.models`, or
            "package.module:function", which is imported and called.
        trust: import and call the function that the file names, where its network is not one of this package's.

    Returns:
        A network that takes images (m, C, H, W) in [0, 1] and returns logits (m, K). Its attributes say what it was
        trained for: ``classes`` (their names), ``image_size`` (pixels a side), ``channels``, and ``threat`` (``norm``
        and ``eps``; None where it was trained without an attack).

    Raises:
        RunError: there is no such file, it is damaged, or it names a function and neither ``network`` nor ``trust``
            was given.
    """
    made, _ = load_with_metadata(run_or_checkpoint, weights=weights, network=network, trust=trust)
    return made.to(device)


def load_with_metadata(
    run_or_checkpoint: str | Path, *, weights: str | None = None, network: str | None = None, trust: bool = False
) -> tuple[nn.Module, Metadata]:
    """What :func:`load` does, on the CPU, and all that the file says about the network."""
    from bullettrain.checkpoint_paths import rather, weights_file
    from bullettrain.run_folder import RunError, RunFolder, read_weights

    file = weights_file(Path(run_or_checkpoint), weights)
    tensors, about = read_weights(file)
    if about.network is None:
        holds = _some("it holds", list(tensors)) or "it holds no tensors"
        raise RunError(f"{file} is no checkpoint of a run: {holds}, and does not say of which network; {rather(file)}")
    name = permitted(about.network.name, file, network=network, trust=trust)
    arguments = {**asdict(about.network), "name": name}
    try:
        # Without memory first, where the sizes are the file's: they have to be those of its tensors.
        with nullcontext() if is_external(name) else torch.device("meta"):
            made = build(**arguments)
        if wrong := misfit(made, tensors):
            raise RunError(f"{file} does not fit its network: {wrong}")
        made = made if is_external(name) else build(**arguments)
    except RunError:
        raise
    except ValueError as error:
        raise RunError(f"{file} cannot be loaded: {error}") from None
    made.load_state_dict(tensors)
    if about.threat is None:  # older files do not say it; their run does
        with suppress(RunError):
            about = replace(about, threat=RunFolder(file.parent).config().method.threat)
    facts = {"classes": about.classes, "image_size": arguments["image_size"], "channels": arguments["channels"]}
    for name, value in {**facts, "threat": about.threat}.items():
        setattr(made, name, value)
    return made.eval(), about


def permitted(name: str, source: Path, *, network: str | None = None, trust: bool = False) -> str:
    """The network to build for the file ``source``, which names ``name``: no other function runs code out of a file.

    Args:
        name: as the file has it.
        source: for the message.
        network: what the user names; it is taken instead.
        trust: whether the user allows what the file names.

    Raises:
        RunError: the file names a function outside this package, and the user has not allowed it.
    """
    from bullettrain.run_folder import RunError

    if network is not None:
        return network
    if is_external(name) and not trust:
        raise RunError(
            f"{source} names the function {name!r}, which is not part of bullettrain and was not imported; to import "
            f"and call it, add {shlex.join(['--network', name])} or --trust (in Python: network=… or trust=True)"
        )
    return name


def misfit(network: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """Which keys of a state_dict do not fit: missing, unknown, of another shape; empty where all fit."""
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
