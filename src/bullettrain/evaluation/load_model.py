"""The network that is judged: a run, a checkpoint, a foreign state_dict, a function of the user's, or timm's."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from bullettrain.brief import first_line
from bullettrain.checkpoint_paths import (
    EXPORTED,
    SAFETENSORS,
    SAVED,
    check_kind,
    check_run,
    choose_weights,
    exported,
    rather,
)
from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError
from bullettrain.loading import load_with_metadata, misfit
from bullettrain.models import Normalize, build
from bullettrain.models.external import Normalisation, build_external, is_external
from bullettrain.run_folder import Metadata, NetworkMetadata, RunError, RunFolder, read_weights

FORMS = (
    "a run's folder, a checkpoint (.safetensors), a state_dict (.pt) with --network, "
    "package.module:function or timm:NAME"
)
READABLE = (SAFETENSORS, SAVED)
WRAPPERS = ("state_dict", "model_state_dict", "model", "net")
"""Keys under which other people's checkpoints hold the weights."""


@dataclass(frozen=True)
class LoadedModel:
    """A network in eval mode, on the CPU, and where it comes from."""

    name: str
    network: nn.Module
    weights: str
    """Which of a run's: "last", "best", "averaged"; else what the user wrote."""
    folder: Path | None = None
    """The run's, where there is one."""
    config: Config | None = None
    about: Metadata = field(default_factory=Metadata)
    """What it is for, as far as that is known: the shape of images, the classes, the threat."""

    @property
    def digest(self) -> str:
        """Changes with the architecture and with every weight and buffer, also those that no checkpoint holds."""
        found = hashlib.blake2b(str(self.network).encode(), digest_size=16)
        for name, tensor in (*self.network.named_parameters(), *self.network.named_buffers()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def load_model(
    model: str,
    *,
    weights: str | None = None,
    network: str | None = None,
    trust: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    channels: int = 3,
    image_size: int = 32,
    classes: int = 10,
) -> LoadedModel:
    """The network that ``model`` names; ConfigError or RunError where there is none.

    Args:
        model: a run's folder, a checkpoint, `package.module:function` or `timm:NAME`.
        weights: of a run's folder, which; None: as :func:`bullettrain.load` has it.
        network: what a state_dict is of: a name of `bullettrain.models`, or a function or timm name as above. It is
            built instead of what a run or its checkpoint names.
        trust: import and call the function that a run or its checkpoint names.
        mean: normalisation in front of a network built from ``network``, one value a channel.
        std: with ``mean``.
        channels: of the images, for a network built from its name.
        image_size: likewise.
        classes: likewise, where the weights do not tell.
    """
    path = exported(Path(model).expanduser())
    if path.is_dir():
        folder, chosen = check_run(path), choose_weights(path, weights)
        _unused("a run's folder says itself what it is of", mean=mean, std=std)
        made, about = load_with_metadata(path, weights=chosen, network=network, trust=trust)
        return LoadedModel(path.resolve().name, made, chosen, path, folder.config(), about)
    if path.is_file():
        _unused(f"{model} is a file, not a run's folder with several", weights=weights)
        tensors, about = read_state(path)
        if about.network is not None:
            _unused("the checkpoint says itself what it is of", mean=mean, std=std)
            made, about = load_with_metadata(path, network=network, trust=trust)
            config, home = run_config(model), path.resolve().parent.name
            if config is None:
                return LoadedModel(home if path.name == EXPORTED else path.name, made, path.name, about=about)
            return LoadedModel(home, made, path.stem, path.parent, config, about)
        if network is None:
            raise ConfigError(f"{model} does not say which network it is of; name it, e.g. --network wrn-34-10")
        shape = {"channels": channels, "image_size": image_size, "classes": classes}
        made = _fill(network, tensors, path, mean, std, shape)
        return LoadedModel(path.name, made, path.name, about=_known(network, made, channels, image_size))
    if is_external(model):
        _unused(f"{model} is a network, not weights for one", network=network)
        _unused(f"{model} is no run's folder", weights=weights)
        inside, own = _called(model, pretrained=True)
        made = _normalised(inside, mean, std, own).eval()
        return LoadedModel(model, made, model, about=_known(model, made, channels, image_size))
    raise _no_network(model)


def _known(name: str, network: nn.Module, channels: int, image_size: int) -> Metadata:
    """What is known of a network that no run left; its classes are found when it is first called."""
    mean = std = None
    for layer in network.modules():
        if isinstance(layer, Normalize):
            mean, std = tuple(layer.mean.flatten().tolist()), tuple(layer.std.flatten().tolist())
    return Metadata(network=NetworkMetadata(name, 0, channels, image_size, mean, std))


def check_form(model: str) -> None:
    """ConfigError or RunError where ``model`` names nothing that is there; what it is of is found out later."""
    path = exported(Path(model).expanduser())
    if path.is_dir():
        check_run(path)
    elif path.is_file():
        check_kind(path, READABLE, FORMS)
    elif not is_external(model):
        raise _no_network(model)


def _no_network(model: str) -> ConfigError:
    hint = " (no such file or folder)" if os.sep in model or Path(model).suffix else ""
    return ConfigError(f"{model!r} is no network{hint}; give {FORMS}")


def run_config(model: str) -> Config | None:
    """The configuration of the run that ``model`` is, or is a checkpoint of; None where there is no run."""
    path = Path(model).expanduser()
    folder = RunFolder(path if path.is_dir() else path.parent)
    return folder.config() if (path.is_dir() or path.is_file()) and folder.exists else None


def read_state(path: Path) -> tuple[dict[str, Tensor], Metadata]:
    """The tensors of a state_dict, and what a run has written about them.

    It is safetensors, or what torch.save wrote, bare or inside a checkpoint. The prefixes that DataParallel and
    torch.compile put before names are taken off.
    """
    if check_kind(path, READABLE, FORMS) == SAFETENSORS:
        return read_weights(path)
    try:
        with path.open("rb") as opened:  # given a path, torch goes by its ending
            content = torch.load(opened, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a foreign file makes of the unpickler
        line = first_line(error)
        why = "it holds more than tensors" if "weights_only" in str(error) else line
        raise RunError(f"{path} cannot be read as weights: {why}; save its state_dict() with torch.save") from None
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not content or not all(map(torch.is_tensor, content.values())):
        do = rather(path, "save the network's state_dict() with torch.save")
        raise RunError(f"{path} holds no state_dict; {do}")
    return {
        str(key).removeprefix("module.").removeprefix("_orig_mod."): value for key, value in content.items()
    }, Metadata()


def _fill(
    network: str,
    tensors: dict[str, Tensor],
    path: Path,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    shape: Mapping[str, int],
) -> nn.Module:
    """The network called ``network`` with the weights of ``path``."""
    if {"mu", "sigma"} <= tensors.keys():  # RobustBench keeps the normalisation beside the weights
        kept = [tensors.pop(key).flatten().tolist() for key in ("mu", "sigma")]
        mean, std = (mean, std) if mean is not None else (kept[0], kept[1])
    if is_external(network):
        inside, own = _called(network, pretrained=False)
        made = _normalised(inside, mean, std, own)
    else:
        try:
            made = inside = build(
                network,
                num_classes=_classes(tensors) or shape["classes"],
                channels=shape["channels"],
                image_size=shape["image_size"],
                mean=mean,
                std=std,
            )
        except ValueError as error:
            raise ConfigError(f"--network: {error}") from None
    try:
        inside.load_state_dict(tensors)
    except RuntimeError:
        raise ConfigError(f"{path} does not fit {network}: {misfit(inside, tensors)}") from None
    return made.eval()


def _classes(tensors: Mapping[str, Tensor]) -> int | None:
    """Rows of the last matrix: the classes of a network that ends in a linear layer."""
    matrices = [tensor for key, tensor in tensors.items() if tensor.ndim == 2 and key.endswith("weight")]
    return len(matrices[-1]) if matrices and len(matrices[-1]) > 1 else None


def _called(text: str, *, pretrained: bool) -> tuple[nn.Module, Normalisation]:
    try:
        return build_external(text, pretrained=pretrained)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _normalised(
    network: nn.Module, mean: Sequence[float] | None, std: Sequence[float] | None, own: Normalisation = (None, None)
) -> nn.Module:
    """The network after a normalisation: the one that is given or else its own, if any."""
    if mean is None and std is None:
        mean, std = own
    if mean is None and std is None:
        return network
    if mean is None or std is None:
        raise ConfigError("--mean and --std go together: give both or neither")
    try:
        return nn.Sequential(Normalize(mean, std), network)
    except ValueError as error:
        raise ConfigError(f"--mean, --std: {error}") from None


def _unused(why: str, **options: object) -> None:
    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"--{option} was given, but {why}; leave it out")
