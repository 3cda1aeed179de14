"""Load networks: from a run, a checkpoint, a state_dict of another project, a function, or timm."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bullettrain.attacks import frozen
from bullettrain.brief import first_line
from bullettrain.checkpoint_paths import SAFETENSORS, check_kind, choose_weights, rather
from bullettrain.config.sections import Config, DataConfig
from bullettrain.config.settings import ConfigError, limits_of, number
from bullettrain.errors import near, raised_as, user_path
from bullettrain.models import Normalize, build
from bullettrain.models.external import build_external, is_external
from bullettrain.run_folder import Metadata, NetworkMetadata, RunError, RunFolder, read_weights
from bullettrain.run_folder.weights import hash_tensors
from bullettrain.validation import check_logits_shape, check_number

FORMS = (
    "a run's folder, a checkpoint (.safetensors), a state_dict (.pt) with --network, "
    "package.module:function or timm:NAME"
)
EXPORTED = "model.safetensors"
"""Weights file in a folder written by `bullettrain export --format hub`."""
WRAPPERS = ("state_dict", "model_state_dict", "model", "net")
"""Keys of the weights in checkpoints of other projects."""


def load(
    run_or_checkpoint: str | Path,
    *,
    weights: str | None = None,
    device: torch.device | str = "cpu",
    network: str | None = None,
    trust: bool = False,
) -> nn.Module:
    """Load the network of a run, in eval mode.

    Args:
        run_or_checkpoint: a run's folder or one of its .safetensors files; with ``network``, also a state_dict saved
            with torch.save.
        weights: which weights of a folder: "last", "best" or "averaged". Default: "best" if the run had a validation
            set, else "last". Not allowed for a file.
        device: of the network.
        network: build this network instead of the one that the file names: a name of `bullettrain.models`, or
            "package.module:function", which is imported and called.
        trust: import and call the function that the file names, if its network is not part of this package.

    Returns:
        A network that takes images (m, C, H, W) in [0, 1] and returns logits (m, K). Its attributes say what it was
        trained for: ``classes`` (their names), ``image_size`` (pixels per side), ``channels``, and ``threat``
        (``norm`` and ``eps``; None if it was trained without an attack).

    Raises:
        RunError: the file is missing or damaged, or it names a function and neither ``network`` nor ``trust`` was
            given.
    """
    return load_model(run_or_checkpoint, weights=weights, network=network, trust=trust).network.to(device)


@dataclass(frozen=True)
class ModelSource:
    """Origin of a network."""

    name: str
    weights: str
    """Name of a run's weights ("last", "best", "averaged"); otherwise as the user wrote it."""
    file: Path | None = None
    """File of the weights; None for a function."""
    folder: Path | None = None
    """Folder of the run, if there is one."""

    @property
    def config(self) -> Config | None:
        """Config of the run, if there is one."""
        return None if self.folder is None else RunFolder(self.folder).config()

    def __str__(self) -> str:
        return f"{self.name}, {self.weights} weights" if self.folder else self.name


@dataclass(frozen=True)
class LoadedModel(ModelSource):
    """A network in eval mode on the CPU, and its origin."""

    network: nn.Module = field(kw_only=True)
    about: Metadata = field(kw_only=True, default_factory=Metadata)
    """Shape of images, classes and threat, as far as known."""

    @property
    def digest(self) -> str:
        """Digest of the architecture, the parameters and all buffers, non-persistent ones included."""
        architecture = hashlib.blake2b(str(self.network).encode(), digest_size=16)
        return hash_tensors(architecture, (*self.network.named_parameters(), *self.network.named_buffers()))


def find_source(model: str | Path, weights: str | None = None) -> ModelSource:
    """Find what ``model`` names.

    Args:
        model: a run's folder, a checkpoint, `package.module:function` or `timm:NAME`.
        weights: which weights of a run's folder; default as in :func:`load`.

    Raises:
        RunError: nothing has that name, or it has no weights.
    """
    path = user_path(model)
    if (path / EXPORTED).is_file():
        path = path / EXPORTED
    home = path if path.is_dir() else path.parent
    folder = home if RunFolder(home).exists else None
    name = home.resolve().name
    if path.is_dir():
        chosen = choose_weights(path, weights)
        return ModelSource(name, chosen, path / f"{chosen}.safetensors", folder)
    if path.is_file():
        check_kind(path, FORMS)
        _unused(f"{path} is a file, not a run's folder with several", weights=weights)
        if folder is not None:
            return ModelSource(name, path.stem, path, folder)
        return ModelSource(name if path.name == EXPORTED else path.name, path.name, path)
    if not is_external(text := str(model)):
        hint = " (no such file or folder)" if os.sep in text or path.suffix else ""
        raise RunError(f"{text!r} is no network{hint}; {rather(path, f'give {FORMS}')}{near(path)}")
    _unused(f"{text} is not a run's folder", weights=weights)
    return ModelSource(text, text)


def load_model(
    model: str | Path,
    weights: str | None = None,
    network: str | None = None,
    trust: bool = False,
    mean: Sequence[float] | str | None = None,
    std: Sequence[float] | str | None = None,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    classes: int = 10,
) -> LoadedModel:
    """Load the network that ``model`` names.

    Args:
        model: a run's folder, a checkpoint, `package.module:function` or `timm:NAME`.
        weights: which weights of a run's folder; default as in :func:`load`.
        network: network of a state_dict: a name of `bullettrain.models`, or a function or timm name as above. It
            replaces what a run or its checkpoint names.
        trust: import and call the function that a run or its checkpoint names.
        mean: normalisation in front of a network that is not from a run, one value per channel; also as text,
            "0.5,0.5,0.5".
        std: likewise.
        image_size: of the images; default: what the model says, else 32.
        channels: of the images; default: what the model says, else 3.
        classes: number of classes, if the weights do not tell.

    Raises:
        RunError: there is no such network, it is damaged, or it needs ``network`` or ``trust``.
    """
    source = find_source(model, weights)
    mean, std = _numbers(mean), _numbers(std)
    sizes: dict[str, Any] = {"image_size": image_size, "channels": channels}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    shape = NetworkMetadata(network or str(model), 0, **{"channels": 3, "image_size": 32, **sizes})
    about = Metadata()
    if source.file is None:
        _unused(f"{model} is a network, not weights for one", network=network)
        with raised_as(RunError, "{error}", ValueError):
            made = build_external(str(model), pretrained=True, mean=mean, std=std)
    else:
        tensors, about = read_state(source.file)
        if about.network is not None:
            _unused("the checkpoint defines its normalisation", mean=mean, std=std)
            name = permitted(about.network.name, source.file, network=network, trust=trust)
            shape = replace(about.network, name=name)
        elif network is None:
            hint = rather(source.file, "name it, e.g. --network wrn-34-10 (in Python: network=…)")
            names = textwrap.shorten(", ".join(tensors), 80, placeholder=" …")
            raise RunError(f"{source.file} does not say which network it is of (it holds {names}); {hint}")
        else:
            if {"mu", "sigma"} <= tensors.keys():  # RobustBench stores the normalisation with the weights
                stored = [_numbers(tensors.pop(key).flatten().tolist()) for key in ("mu", "sigma")]
                mean, std = (mean, std) if mean is not None else stored
            shape = replace(shape, num_classes=_classes(tensors) or classes, mean=mean, std=std)
        made = _filled(shape, tensors, source.file)
    if about.network is None:
        shape = replace(shape, **_normalisation(made))
    elif about.threat is None and source.folder is not None:  # a file of an older version; its run says it
        with suppress(RunError):
            about = replace(about, threat=RunFolder(source.folder).config().method.threat)
    about = replace(about, network=replace(shape, **sizes))
    attributes = {"classes": about.classes, "image_size": shape.image_size, "channels": shape.channels}
    for name, value in {**attributes, "threat": about.threat}.items():
        setattr(made, name, value)
    return LoadedModel(**vars(source), network=made.eval(), about=about)


def _numbers(values: Sequence[float] | str | None) -> tuple[float, ...] | None:
    """Return numbers, also from text such as `0.49,0.48,0.45`."""
    if values is None:
        return None
    return tuple(map(number, values.split(","))) if isinstance(values, str) else tuple(values)


def with_shape(model: LoadedModel) -> LoadedModel:
    """Return ``model`` with the number and names of its classes, found by a call on two black images.

    Raises:
        ConfigError: the network does not take such images, or their size is out of range.
    """
    shape = model.about.network
    assert shape is not None
    check_number(shape.image_size, "--image-size", error=ConfigError, **limits_of(DataConfig, "image_size"))
    black = torch.zeros(2, shape.channels, shape.image_size, shape.image_size)
    classes = try_network(model.network, black, "such images (--channels and --image-size change that)").shape[1]
    names = model.about.classes or tuple(map(str, range(classes)))
    return replace(model, about=replace(model.about, network=replace(shape, num_classes=classes), classes=names))


def try_network(network: nn.Module, x: Tensor, what: str) -> Tensor:
    """Return the logits (m, K) of a network in eval mode.

    Args:
        network: the network to call.
        x: images (m, C, H, W).
        what: describes the images in the error message.

    Raises:
        ConfigError: the network does not take the images, or does not return logits.
    """
    try:
        with frozen(network), torch.no_grad():
            logits: Tensor = network(x)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        size = "×".join(str(side) for side in x.shape[1:])
        raise ConfigError(f"the network does not take {what}, {size}: {first_line(error)}") from None
    with raised_as(ConfigError, "{error}", ValueError, TypeError):
        check_logits_shape(logits, len(x))
    return logits


def read_state(path: Path) -> tuple[dict[str, Tensor], Metadata]:
    """Read a state_dict and its metadata.

    The file is safetensors, or was written by torch.save: a state_dict, or a checkpoint that contains one. Prefixes of
    DataParallel and torch.compile are removed from the names.

    Raises:
        RunError: the file cannot be read, or holds no state_dict.
    """
    if check_kind(path, FORMS) == SAFETENSORS:
        return read_weights(path)

    def unread(error: Exception) -> str:  # torch's message advises to load the file unsafely
        why = "it holds more than tensors" if "weights_only" in str(error) else "it is damaged, {error}"
        return f"{path} cannot be read as weights: {why}; save its state_dict() with torch.save"

    # An unpickler can raise anything; given a path, torch looks at its suffix.
    with raised_as(RunError, unread, Exception), path.open("rb") as opened:
        content = torch.load(opened, map_location="cpu", weights_only=True)
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not content or not all(map(torch.is_tensor, content.values())):
        hint = rather(path, "save the network's state_dict() with torch.save")
        raise RunError(f"{path} holds no state_dict; {hint}")
    names = (re.sub(r"^(?:module\.|_orig_mod\.)+", "", str(name)) for name in content)
    return dict(zip(names, content.values(), strict=True)), Metadata()


def permitted(name: str, source: Path, *, network: str | None = None, trust: bool = False) -> str:
    """Return the network to build for a file. Only this function permits a file to have code imported.

    Args:
        name: network that the file names.
        source: path of the file, for the message.
        network: network that the user names; replaces ``name``.
        trust: whether the user allows functions that the file names.

    Raises:
        RunError: the file names a function outside this package without permission.
    """
    if network is not None:
        return network
    if is_external(name) and not trust:
        wrong = f"{source} names the function {name!r}, which is not part of bullettrain and was not imported"
        allow = f"{shlex.join(['--network', name])} or --trust (in Python: network=… or trust=True)"
        raise RunError(f"{wrong}; to import and call it, add {allow}")
    return name


def fill(network: nn.Module, tensors: Mapping[str, Tensor], file: Path, name: str) -> None:
    """Load the tensors of ``file`` into the network ``name``. Raises RunError if they do not fit."""

    def misfit(error: RuntimeError) -> str:
        wrong = textwrap.shorten(str(error).partition(":")[2], 300, placeholder=" …")
        return f"{file} does not fit {name}: {wrong}"

    with raised_as(RunError, misfit, RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading into meta tensors is a no-op, which is meant
        network.load_state_dict(tensors)


def _filled(shape: NetworkMetadata, tensors: dict[str, Tensor], file: Path) -> nn.Module:
    """Build a network and load the weights of ``file``, with or without those of its normalisation."""
    # First on the meta device: sizes that the file claims but its tensors do not have would take memory.
    for device in ["cpu"] if is_external(shape.name) else ["meta", "cpu"]:
        with raised_as(RunError, f"{file} cannot be loaded: {{error}}", ValueError), torch.device(device):
            made = build(**asdict(shape))
        target = made
        if isinstance(made, nn.Sequential) and isinstance(made[0], Normalize):
            target = made if tensors.keys() == made.state_dict().keys() else made[1]
        fill(target, tensors, file, shape.name)
    return made


def _normalisation(network: nn.Module) -> dict[str, Any]:
    """Return mean and standard deviation of the network's Normalize layer, if it has one."""
    for layer in network.modules():
        if isinstance(layer, Normalize):
            return {name: tuple(getattr(layer, name).flatten().tolist()) for name in ("mean", "std")}
    return {}


def _classes(tensors: Mapping[str, Tensor]) -> int | None:
    """Return the number of rows of the last matrix: the classes, if the network ends in a linear layer."""
    matrices = [tensor for key, tensor in tensors.items() if tensor.ndim == 2 and key.endswith("weight")]
    return len(matrices[-1]) if matrices and len(matrices[-1]) > 1 else None


def _unused(why: str, **options: object) -> None:
    for option, value in options.items():
        if value is not None:
            raise RunError(f"--{option} was given, but {why}; leave it out")
