"""A network from whatever names one: a run, a checkpoint, other people's weights, a function, or a timm name."""

from __future__ import annotations

import hashlib
import os
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
from bullettrain.errors import user_path
from bullettrain.models import Normalize, build
from bullettrain.models.external import build_external, is_external
from bullettrain.run_folder import Metadata, NetworkMetadata, RunError, RunFolder, read_weights
from bullettrain.validation import check_logits_shape

FORMS = (
    "a run's folder, a checkpoint (.safetensors), a state_dict (.pt) with --network, "
    "package.module:function or timm:NAME"
)
EXPORTED = "model.safetensors"
"""The weights in a folder that `bullettrain export --format hub` wrote."""
WRAPPERS = ("state_dict", "model_state_dict", "model", "net")
"""Keys under which other people's checkpoints hold the weights."""


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
        run_or_checkpoint: a run's folder, or one of its .safetensors files; with ``network``, also a state_dict that
            torch.save wrote.
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
    return load_model(run_or_checkpoint, weights=weights, network=network, trust=trust).network.to(device)


@dataclass(frozen=True)
class Source:
    """Where a network comes from."""

    name: str
    weights: str
    """Which of a run's: "last", "best", "averaged"; else what the user wrote."""
    file: Path | None = None
    """Of the weights; None for a function."""
    folder: Path | None = None
    """The run's, where there is one."""

    @property
    def config(self) -> Config | None:
        """The run's, where there is one."""
        return None if self.folder is None else RunFolder(self.folder).config()

    def __str__(self) -> str:
        return f"{self.name}, {self.weights} weights" if self.folder else self.name


@dataclass(frozen=True)
class LoadedModel(Source):
    """A network in eval mode, on the CPU, and where it comes from."""

    network: nn.Module = field(kw_only=True)
    about: Metadata = field(kw_only=True, default_factory=Metadata)
    """What it is for, as far as that is known: the shape of images, the classes, the threat."""

    @property
    def digest(self) -> str:
        """Changes with the architecture and with every weight and buffer, also those that no checkpoint holds."""
        found = hashlib.blake2b(str(self.network).encode(), digest_size=16)
        for name, tensor in (*self.network.named_parameters(), *self.network.named_buffers()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def find_source(model: str | Path, weights: str | None = None) -> Source:
    """What ``model`` names.

    Args:
        model: a run's folder, a checkpoint, `package.module:function` or `timm:NAME`.
        weights: of a run's folder, which; None: as :func:`load` has it.

    Raises:
        RunError: there is nothing of that name, or no weights in it.
    """
    path = user_path(model)
    if (path / EXPORTED).is_file():
        path = path / EXPORTED
    home = path if path.is_dir() else path.parent
    folder = home if RunFolder(home).exists else None
    name = home.resolve().name
    if path.is_dir():
        chosen = choose_weights(path, weights)
        return Source(name, chosen, path / f"{chosen}.safetensors", folder)
    if path.is_file():
        check_kind(path, FORMS)
        _unused(f"{path} is a file, not a run's folder with several", weights=weights)
        if folder is not None:
            return Source(name, path.stem, path, folder)
        return Source(name if path.name == EXPORTED else path.name, path.name, path)
    if not is_external(text := str(model)):
        hint = " (no such file or folder)" if os.sep in text or path.suffix else ""
        raise RunError(f"{text!r} is no network{hint}; {rather(path, f'give {FORMS}')}")
    _unused(f"{text} is no run's folder", weights=weights)
    return Source(text, text)


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
    """The network that ``model`` names, as :func:`find_source` has it.

    Args:
        model: a run's folder, a checkpoint, `package.module:function` or `timm:NAME`.
        weights: of a run's folder, which; None: as :func:`load` has it.
        network: what a state_dict is of: a name of `bullettrain.models`, or a function or timm name as above. It is
            built instead of what a run or its checkpoint names.
        trust: import and call the function that a run or its checkpoint names.
        mean: normalisation in front of a network that no run left, one value a channel; also as text, "0.5,0.5,0.5".
        std: with ``mean``.
        image_size: of the images; None: what the model says, else 32.
        channels: likewise, else 3.
        classes: where the weights do not tell.

    Raises:
        RunError: there is no such network, it is damaged, or may not be built.
    """
    source = find_source(model, weights)
    mean, std = _numbers(mean), _numbers(std)
    sides: dict[str, Any] = {"image_size": image_size, "channels": channels}
    sides = {name: value for name, value in sides.items() if value is not None}
    shape = NetworkMetadata(network or str(model), 0, **{"channels": 3, "image_size": 32, **sides})
    about = Metadata()
    if source.file is None:
        _unused(f"{model} is a network, not weights for one", network=network)
        try:
            made = build_external(str(model), pretrained=True, mean=mean, std=std)
        except ValueError as error:
            raise RunError(str(error)) from None
    else:
        tensors, about = read_state(source.file)
        if about.network is not None:
            _unused("the checkpoint says itself what it is of", mean=mean, std=std)
            name = permitted(about.network.name, source.file, network=network, trust=trust)
            shape = replace(about.network, name=name)
        elif network is None:
            do = rather(source.file, "name it, e.g. --network wrn-34-10 (in Python: network=…)")
            holds = textwrap.shorten(", ".join(tensors), 80, placeholder=" …")
            raise RunError(f"{source.file} does not say which network it is of (it holds {holds}); {do}")
        else:
            if {"mu", "sigma"} <= tensors.keys():  # RobustBench keeps the normalisation beside the weights
                kept = [_numbers(tensors.pop(key).flatten().tolist()) for key in ("mu", "sigma")]
                mean, std = (mean, std) if mean is not None else kept
            shape = replace(shape, num_classes=_classes(tensors) or classes, mean=mean, std=std)
        made = _filled(shape, tensors, source.file)
    if about.network is None:
        shape = replace(shape, **_normalisation(made))
    elif about.threat is None and source.folder is not None:  # older files do not say it; their run does
        with suppress(RunError):
            about = replace(about, threat=RunFolder(source.folder).config().method.threat)
    about = replace(about, network=replace(shape, **sides))
    facts = {"classes": about.classes, "image_size": shape.image_size, "channels": shape.channels}
    for fact, value in {**facts, "threat": about.threat}.items():
        setattr(made, fact, value)
    return LoadedModel(**vars(source), network=made.eval(), about=about)


def _numbers(values: Sequence[float] | str | None) -> tuple[float, ...] | None:
    """`0.49,0.48,0.45` as numbers."""
    if values is None:
        return None
    return tuple(map(number, values.split(","))) if isinstance(values, str) else tuple(values)


def with_shape(model: LoadedModel) -> LoadedModel:
    """``model``, on the CPU, with the number and the names of its classes, found by calling it on two black images.

    Raises:
        ConfigError: the network does not take such images, or nobody does.
    """
    shape = model.about.network
    assert shape is not None
    low, high = limits_of(DataConfig, "image_size")
    if not low <= shape.image_size <= high:
        raise ConfigError(f"--image-size is {shape.image_size}; it has to be at least {low} and at most {high}")
    black = torch.zeros(2, shape.channels, shape.image_size, shape.image_size)
    classes = try_network(model.network, black, "such images (--channels and --image-size change that)").shape[1]
    names = model.about.classes or tuple(map(str, range(classes)))
    return replace(model, about=replace(model.about, network=replace(shape, num_classes=classes), classes=names))


def try_network(network: nn.Module, x: Tensor, what: str) -> Tensor:
    """Logits (m, K) of images x (m, C, H, W), which are ``what``, in eval mode.

    Raises:
        ConfigError: the network does not take them, or does not return logits.
    """
    try:
        with frozen(network), torch.no_grad():
            logits: Tensor = network(x)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        size = "×".join(str(side) for side in x.shape[1:])
        raise ConfigError(f"the network does not take {what}, {size}: {first_line(error)}") from None
    try:
        check_logits_shape(logits, len(x))
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None
    return logits


def read_state(path: Path) -> tuple[dict[str, Tensor], Metadata]:
    """The tensors of a state_dict, and what a run has written about them.

    It is safetensors, or what torch.save wrote, bare or inside a checkpoint. The prefixes that DataParallel and
    torch.compile put before names are taken off.
    """
    if check_kind(path, FORMS) == SAFETENSORS:
        return read_weights(path)
    try:
        with path.open("rb") as opened:  # given a path, torch goes by its ending
            content = torch.load(opened, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a foreign file makes of the unpickler
        # Torch advises to load it unsafely, which is not repeated.
        why = "it holds more than tensors" if "weights_only" in str(error) else f"it is damaged, {first_line(error)}"
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
    if network is not None:
        return network
    if is_external(name) and not trust:
        raise RunError(
            f"{source} names the function {name!r}, which is not part of bullettrain and was not imported; to import "
            f"and call it, add {shlex.join(['--network', name])} or --trust (in Python: network=… or trust=True)"
        )
    return name


def fill(network: nn.Module, tensors: Mapping[str, Tensor], file: Path, name: str) -> None:
    """Load the tensors of ``file`` into a network, which is called ``name``; RunError where they do not fit."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a network without memory stays as it is
            network.load_state_dict(tensors)
    except RuntimeError as error:
        wrong = textwrap.shorten(str(error).partition(":")[2], 300, placeholder=" …")
        raise RunError(f"{file} does not fit {name}: {wrong}") from None


def _filled(shape: NetworkMetadata, tensors: dict[str, Tensor], file: Path) -> nn.Module:
    """The network of that shape with the weights of ``file``, with or without those of a normalisation in front."""
    # Without memory first, where the sizes are the file's: they have to be those of its tensors.
    for device in ["cpu"] if is_external(shape.name) else ["meta", "cpu"]:
        try:
            with torch.device(device):
                made = build(**asdict(shape))
        except ValueError as error:
            raise RunError(f"{file} cannot be loaded: {error}") from None
        target = made
        if isinstance(made, nn.Sequential) and isinstance(made[0], Normalize):
            target = made if tensors.keys() == made.state_dict().keys() else made[1]
        fill(target, tensors, file, shape.name)
    return made


def _normalisation(network: nn.Module) -> dict[str, Any]:
    """Mean and standard deviation of the layer that normalises, if there is one."""
    for layer in network.modules():
        if isinstance(layer, Normalize):
            return {name: tuple(getattr(layer, name).flatten().tolist()) for name in ("mean", "std")}
    return {}


def _classes(tensors: Mapping[str, Tensor]) -> int | None:
    """Rows of the last matrix: the classes of a network that ends in a linear layer."""
    matrices = [tensor for key, tensor in tensors.items() if tensor.ndim == 2 and key.endswith("weight")]
    return len(matrices[-1]) if matrices and len(matrices[-1]) > 1 else None


def _unused(why: str, **options: object) -> None:
    for option, value in options.items():
        if value is not None:
            raise RunError(f"--{option} was given, but {why}; leave it out")
