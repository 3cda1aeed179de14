"""A network from whatever names one: a run, a checkpoint, other people's weights, a function, or a timm name."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from bullettrain.attacks import frozen
from bullettrain.brief import first_line
from bullettrain.checkpoint_paths import EXPORTED, SAFETENSORS, SAVED, check_kind, choose_weights, exported, rather
from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError
from bullettrain.errors import user_path
from bullettrain.models import Normalize, build
from bullettrain.models.external import build_external, is_external
from bullettrain.run_folder import Metadata, NetworkMetadata, RunError, RunFolder, read_weights
from bullettrain.validation import check_logits_shape

FORMS = (
    "a run's folder, a checkpoint (.safetensors), a state_dict (.pt) with --network, "
    "package.module:function or timm:NAME"
)
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
    path = exported(user_path(model))
    home = path if path.is_dir() else path.parent
    folder = home if RunFolder(home).exists else None
    name = home.resolve().name
    if path.is_dir():
        chosen = choose_weights(path, weights)
        return Source(name, chosen, path / f"{chosen}.safetensors", folder)
    if path.is_file():
        check_kind(path, (SAFETENSORS, SAVED), FORMS)
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
    """The network that ``model`` names, as :func:`find_source` has it.

    Args:
        model: a run's folder, a checkpoint, `package.module:function` or `timm:NAME`.
        weights: of a run's folder, which; None: as :func:`load` has it.
        network: what a state_dict is of: a name of `bullettrain.models`, or a function or timm name as above. It is
            built instead of what a run or its checkpoint names.
        trust: import and call the function that a run or its checkpoint names.
        mean: normalisation in front of a network that no run left, one value a channel.
        std: with ``mean``.
        channels: of the images, where the model does not say.
        image_size: likewise.
        classes: likewise, where the weights do not tell.

    Raises:
        RunError: there is no such network, it is damaged, or may not be built.
    """
    source = find_source(model, weights)
    if source.file is None:
        _unused(f"{model} is a network, not weights for one", network=network)
        try:
            made = build_external(str(model), pretrained=True, mean=mean, std=std)
        except ValueError as error:
            raise RunError(str(error)) from None
        about = Metadata(network=NetworkMetadata(str(model), 0, channels, image_size, *_normalisation(made)))
        return LoadedModel(**vars(source), network=_described(made, about), about=about)
    tensors, about = read_state(source.file)
    if about.network is not None:
        _unused("the checkpoint says itself what it is of", mean=mean, std=std)
        shape = replace(about.network, name=permitted(about.network.name, source.file, network=network, trust=trust))
        made = _filled(shape, tensors, source.file)
        if about.threat is None and source.folder is not None:  # older files do not say it; their run does
            with suppress(RunError):
                about = replace(about, threat=RunFolder(source.folder).config().method.threat)
    elif network is None:
        do = rather(source.file, "name it, e.g. --network wrn-34-10 (in Python: network=…)")
        raise RunError(f"{source.file} does not say which network it is of ({_some('it holds', list(tensors))}); {do}")
    else:
        if {"mu", "sigma"} <= tensors.keys():  # RobustBench keeps the normalisation beside the weights
            kept = [tuple(tensors.pop(key).flatten().tolist()) for key in ("mu", "sigma")]
            mean, std = (mean, std) if mean is not None else kept
        shape = NetworkMetadata(network, _classes(tensors) or classes, channels, image_size)
        shape = replace(shape, mean=None if mean is None else tuple(mean), std=None if std is None else tuple(std))
        made = _filled(shape, tensors, source.file, inner=True)
        mean, std = _normalisation(made)
        about = Metadata(network=replace(shape, mean=mean, std=std))
    return LoadedModel(**vars(source), network=_described(made, about), about=about)


def with_shape(model: LoadedModel, *, image_size: int | None = None, channels: int | None = None) -> LoadedModel:
    """``model`` with the number and the names of its classes, found by calling it on two black images.

    Args:
        model: on the CPU.
        image_size: of the images, instead of what the model says.
        channels: likewise.

    Raises:
        ConfigError: the network does not take such images.
    """
    assert model.about.network is not None
    shape = model.about.network
    side, channels = image_size or shape.image_size, channels or shape.channels
    what = "such images (--channels and --image-size change that)"
    classes = try_network(model.network, torch.zeros(2, channels, side, side), what).shape[1]
    shape = replace(shape, num_classes=classes, image_size=side, channels=channels)
    names = model.about.classes or tuple(map(str, range(classes)))
    return replace(model, about=replace(model.about, network=shape, classes=names))


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
    if check_kind(path, (SAFETENSORS, SAVED), FORMS) == SAFETENSORS:
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


def _filled(shape: NetworkMetadata, tensors: dict[str, Tensor], file: Path, *, inner: bool = False) -> nn.Module:
    """The network of that shape with the weights of ``file``; ``inner``: those behind a normalisation in front."""
    own = not is_external(shape.name)
    try:
        # Without memory first, where the sizes are the file's: they have to be those of its tensors.
        with torch.device("meta") if own else nullcontext():
            made = build(**asdict(shape))
        target, wrong = made, misfit(made, tensors)
        if wrong and inner and isinstance(made, nn.Sequential) and isinstance(made[0], Normalize):
            target, wrong = made[1], misfit(made[1], tensors)
        if wrong:
            raise RunError(f"{file} does not fit {shape.name}: {wrong}")
        if own:
            made = target = build(**asdict(shape))
    except RunError:
        raise
    except ValueError as error:
        raise RunError(f"{file} cannot be loaded: {error}") from None
    target.load_state_dict(tensors)
    return made


def _described(network: nn.Module, about: Metadata) -> nn.Module:
    """The network in eval mode, with what it is for as attributes."""
    assert about.network is not None
    facts = {"classes": about.classes, "image_size": about.network.image_size, "channels": about.network.channels}
    for name, value in {**facts, "threat": about.threat}.items():
        setattr(network, name, value)
    return network.eval()


def _normalisation(network: nn.Module) -> list[tuple[float, ...] | None]:
    """Mean and standard deviation of the layer that normalises, if there is one."""
    for layer in network.modules():
        if isinstance(layer, Normalize):
            return [tuple(layer.mean.flatten().tolist()), tuple(layer.std.flatten().tolist())]
    return [None, None]


def _classes(tensors: Mapping[str, Tensor]) -> int | None:
    """Rows of the last matrix: the classes of a network that ends in a linear layer."""
    matrices = [tensor for key, tensor in tensors.items() if tensor.ndim == 2 and key.endswith("weight")]
    return len(matrices[-1]) if matrices and len(matrices[-1]) > 1 else None


def _some(what: str, keys: Sequence[str], most: int = 3) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return f"{what} {', '.join(keys[:most])}{more}".strip() if keys else ""


def _unused(why: str, **options: object) -> None:
    for option, value in options.items():
        if value is not None:
            raise RunError(f"--{option} was given, but {why}; leave it out")
