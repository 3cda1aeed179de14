"""The settings of a run, as dataclasses. `--set section.key=value` changes them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bullettrain.allocation import needs_selection
from bullettrain.attacks.norms import USUAL_EPS, Ball
from bullettrain.config.format1 import FORMER
from bullettrain.config.method import OBJECTIVES, MethodConfig
from bullettrain.config.settings import TINY, ConfigError, as_setting, find, limited, parse
from bullettrain.engine.cuda_graphs import CUDNN_BENCHMARK_AFTER
from bullettrain.errors import raised_as
from bullettrain.schema import SchemaError, conform
from bullettrain.validation import SettingsError, check_limits


@dataclass(frozen=True)
class DataConfig:
    """The dataset."""

    name: str = "digits"
    """Dataset: digits, mnist, cifar10, cifar100, folder:PATH or npz:PATH."""
    validation: int = limited(0, 0, 1e9)
    """Number of training images to hold out for choosing the best epoch."""
    crop: int = limited(0, 0, 1024)
    """Zero padding in pixels before a random crop; 0 for no cropping."""
    flip: bool = False
    """Whether to flip images horizontally at random."""
    views: bool | float | None = limited(False, 0, 1)
    """Replace all images (true), or this share of them, by one AugMix view of themselves."""
    train_size: int = limited(0, 0, 1e9)
    """Number of training images to use, in proportion to the classes; 0 for all."""
    test_size: int = limited(0, 0, 1e9)
    """Number of test images to use; 0 for all."""
    image_size: int | None = limited(None, 1, 4096)
    """Height and width to resize the images of a folder to; null to keep their size."""


@dataclass(frozen=True)
class NetworkConfig:
    """The network."""

    name: str = "small-cnn"
    """Network: small-cnn, preact-resnet-18, wrn-D-W, package.module:function or timm:NAME."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel, for input normalisation inside the network; null for none."""
    std: tuple[float, ...] | None = None
    """Standard deviation of each channel, with mean."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    """Optimizer."""
    lr: float = limited(0.1, TINY, 1e30)
    """Learning rate; with a schedule, the highest one."""
    momentum: float = limited(0.9, 0, 0.999999)
    """Momentum of SGD."""
    nesterov: bool = False
    """Whether SGD uses Nesterov momentum."""
    weight_decay: float = limited(0.0, 0, 1e30)
    """Weight decay; that of adamw is decoupled from the gradient."""
    decay_norms: bool = True
    """Whether to apply weight decay to normalisation layers and biases too."""
    clip: float = limited(0.0, 0, 1e30)
    """Maximum norm of the gradient; 0 for no clipping."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate schedule. It is updated at every step."""

    name: Literal["constant", "step", "one-cycle", "cosine"] = "constant"
    """Learning rate schedule."""
    milestones: tuple[int, ...] = limited((), 1, 1e6)
    """step: epochs, counted from 1, at whose start the learning rate is multiplied by factor."""
    factor: float = limited(0.1, TINY, 1e30)
    """step: factor of the learning rate at each milestone."""
    warmup: float = limited(0.3, 0, 1)
    """one-cycle: share of the steps in which the learning rate rises from 0; it then falls linearly to 0."""
    final: float = limited(0.0, 0, 1e30)
    """cosine: learning rate at the end."""


@dataclass(frozen=True)
class TrainingConfig:
    """The training loop."""

    epochs: int = limited(30, 1, 1e6)
    """Number of epochs."""
    batch_size: int = limited(128, 1, 1e6)
    """Batch size, summed over all processes."""
    seed: int = limited(0, 0, 2**63 - 1)
    """Random seed."""
    engine: Literal["auto", "eager", "graphs"] = "auto"
    """eager runs PyTorch as usual; graphs captures steps in CUDA graphs; auto is graphs on a GPU, else eager."""
    attack_group: int = limited(1, 1, 1024)
    """Number of batches that are attacked at once with the same weights; the paper uses 1."""
    paired_forward: bool = True
    """Whether clean and attacked examples share one forward, with separate batch statistics; needs compile and
    graphs."""
    size_multiple: int = limited(8, 1, 1e6)
    """With graphs, the number of attacked examples is rounded up to a multiple of this."""
    cudnn_benchmark_after: float = limited(CUDNN_BENCHMARK_AFTER, 0, 1e30)
    """With graphs in bf16, seconds of use before cuDNN benchmarks the convolutions of a size; 0 for at once."""
    accumulate: int = limited(1, 1, 10_000)
    """Number of batches whose gradients are accumulated before each optimizer step."""
    replays: int = limited(1, 1, 10_000)
    """Number of times that each batch is trained on in a row; Free uses 8, with an eighth of the epochs."""
    precision: Literal["auto", "float32", "bf16"] = "float32"
    """Precision of training; auto is bf16 autocast on GPUs that support it, else float32."""
    channels_last: bool = False
    """Whether to store images and weights channels last, which is faster on GPUs."""
    compile: bool = False
    """Whether to compile the network with torch.compile."""
    average: float = limited(0.999, 0, 0.9999999)
    """Decay of the moving average of the weights, limited to n / (n + 9) at update n; 0 for no average."""
    threads: int = limited(0, 0, 1024)
    """Number of CPU threads; 0 for PyTorch's default, or for one thread if small-cnn is trained on a CPU."""
    log_every: int = limited(50, 1, 1e9)
    """Number of steps between log records."""
    save_minutes: float = limited(10.0, 0, 1e9)
    """Minutes between checkpoints within an epoch; one is also saved after every epoch."""
    probe: int = limited(256, 0, 1e9)
    """Number of training images on which PGD-10 checks for collapse after each epoch; 0 for no check."""


@dataclass(frozen=True)
class EvaluationConfig:
    """The evaluation after training."""

    batch_size: int = limited(500, 1, 1e6)
    """Batch size."""
    search: Literal["float32", "tf32", "bf16"] = "float32"
    """Precision of the attacks; accuracy is always counted in float32."""
    steps: int = limited(20, 1, 100_000)
    """Number of PGD steps on each test image."""
    step_size: float | None = limited(None, TINY, 1e30)
    """PGD step size; null for 0.003 at eps 0.031, else eps/10, or more if the steps would not cross the ball."""
    restarts: int = limited(1, 1, 10_000)
    """Number of PGD restarts; an image counts as correct if it withstands all of them."""


FEWEST_UPDATES = 600
"""Updates for which a small training set gets enough epochs, in advice."""
SPEED = ("engine", "paired_forward", "size_multiple", "channels_last", "compile", "threads")
_OTHERS = ("cudnn_benchmark_after", "seed", "average", "log_every", "save_minutes", "probe")
NOT_LEARNT = {f"training.{key}" for key in (*SPEED, *_OTHERS)} | {"evaluation.batch_size", "evaluation.search"}
"""Settings that do not change the trained weights, but speed (SPEED), seed, logging and evaluation."""
SELECTION_ONLY = {"method.gamma", "method.momentum"}
"""Settings without effect if all examples get the same steps."""


@dataclass(frozen=True)
class Config:
    """The settings of a run."""

    recipe: str = "digits"
    """Name of the run: a recipe of `bullettrain train --list`, or a file."""
    data: DataConfig = field(default_factory=DataConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        for name in sections():
            check_limits(getattr(self, name), f"{name}.", ConfigError)
        if self.optimizer.nesterov and not self.optimizer.momentum:
            raise ConfigError("optimizer.nesterov is set without momentum; set optimizer.momentum, e.g. to 0.9")
        with raised_as(ConfigError, _of_method, ValueError, TypeError):
            self.method.build_objective()
        ball = Ball.of(self.method.norm, self.method.eps)
        for name in ("method", "evaluation"):
            with raised_as(ConfigError, "{error}", ValueError):
                ball.check_step(getattr(self, name).step_size or 0.0, f"{name}.step_size")
        with raised_as(ConfigError, _of_method, ValueError, TypeError):
            self.method.build()
        if self.method.kind.moved_by_update and self.training.accumulate > 1:
            name = self.method.objective
            raise ConfigError(f"{name} moves its perturbations with every update; training.accumulate has to be 1")

    def doubts(self, images: int | None = None, *, on_cpu: bool = False) -> list[str]:
        """Return notes on settings that are valid, but probably not intended.

        Args:
            images: number of training images, if known.
            on_cpu: whether to train on a CPU.
        """
        doubts, size = [self.method.shortfall()], self.training.batch_size
        if images is not None and images < size:
            smaller = max(1, images // 10)
            lr = self.optimizer.lr * math.sqrt(smaller / size)
            epochs = max(self.training.epochs, math.ceil(FEWEST_UPDATES / math.ceil(images / smaller)))
            mend = f"give smaller ones, e.g. --batch-size {smaller} --lr {lr:.2g} --epochs {epochs}"
            doubts.append(f"{images} training images do not fill a batch of {size}, so an epoch is one step; {mend}")
        name, side = self.network.name, self.data.image_size or 0
        if on_cpu and name != "small-cnn" and ":" not in name:
            mend = "--network small-cnn" + " --set image_size=32" * (side > 32)
            doubts.append(f"{name} is slow on a CPU; much faster, but less accurate: {mend}")
        if self.method.selection == "last" and self.training.epochs == 1:
            doubts.append("selection=last has no logits in the first epoch: every example is a boundary example")
        group = size * (self.training.accumulate if self.training.accumulate > 1 else self.training.attack_group)
        if images is not None and 0 < self.method.leave_out * images / 2 < group:
            mend = "give a smaller --batch-size, or attack_group"
            doubts.append(f"leave_out leaves out whole groups of {group} images, of {images} probably none; {mend}")
        return [doubt for doubt in doubts if doubt is not None]

    def baseline(self) -> Config:
        """Return the config without BulletTrain: every example gets the full number of steps."""
        full = self.method.boundary
        plain = {"separation": "quantile", "allocation": "categories", "allocation_value": None, "shuffled": False}
        whole = {"leave_out": 0.0, "leave_out_by": "margin"}
        return self.replace_section("method", robust=full, outlier=full, **plain, **whole)

    def replace_section(self, section: str, **changes: Any) -> Config:
        """Return a copy with changes in one section."""
        return dataclasses.replace(self, **{section: dataclasses.replace(getattr(self, section), **changes)})

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as nested dicts, for YAML and JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    @classmethod
    def from_dict(cls, values: Any) -> Config:
        """Create a config from nested dicts, as :meth:`to_dict` returns. Missing settings get their defaults.

        Raises:
            ConfigError: a setting is unknown, of the wrong type, or out of range.
        """
        if isinstance(values, Mapping):
            values = {name: value for name, value in values.items() if name not in ("format", "environment")}
        with raised_as(ConfigError, "{error}", SchemaError):
            config: Config = conform(values, cls, text=parse)
        return config

    def with_settings(self, settings: Sequence[str]) -> Config:
        """Return a copy with `section.key=value` applied. A key that is in only one section needs no section."""
        changes: dict[str, dict[str, Any]] = {}
        for setting in settings:
            path, equals, text = setting.partition("=")
            if not equals:
                raise ConfigError(f"--set {setting}: write key=value, e.g. --set method.eps=8/255")
            section, key, hint = find(path.strip(), sections())
            changes.setdefault(section, {})[key] = parse(text.strip(), hint, f"{section}.{key}")
        self._follow_eps(changes)
        _follow_objective(changes.get("method", {}))
        # All at once, since some settings are only valid together.
        changed = {name: dataclasses.replace(getattr(self, name), **values) for name, values in changes.items()}
        return dataclasses.replace(self, **changed)

    def _follow_eps(self, changes: dict[str, dict[str, Any]]) -> None:
        """Require a new eps with a new norm, and reset evaluation.step_size with a new eps."""
        method = changes.get("method", {})
        norm, eps = method.get("norm", self.method.norm), method.get("eps", self.method.eps)
        if norm != self.method.norm and "eps" not in method:
            both = f"set both, e.g. --set eps={USUAL_EPS[norm]}"
            raise ConfigError(f"method.norm is {norm}, and eps {eps:g} is of {self.method.norm}; {both}")
        if eps != self.method.eps:
            changes.setdefault("evaluation", {}).setdefault("step_size", None)

    def differences(self, other: Config) -> dict[str, tuple[Any, Any]]:
        """Return the settings that differ, except the recipe's name: {"section.key": (own value, other's value)}."""
        own, others = flatten(self.to_dict()), flatten(other.to_dict())
        return {key: (own[key], others[key]) for key in own if own[key] != others[key] and key != "recipe"}

    def identity(self) -> str:
        """Return a hash of the settings that change the weights or the evaluation, without the seed."""
        defaults = flatten(Config().to_dict())
        ignored = NOT_LEARNT if needs_selection(self.method.allocator()) else NOT_LEARNT | SELECTION_ONLY
        changed = {
            FORMER.get(key, key): value  # keeps the names of existing runs
            for key, value in flatten(self.to_dict()).items()
            if value != defaults[key] and key not in ignored
        }
        text = json.dumps(changed, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()[:8]


def _follow_objective(method: dict[str, Any]) -> None:
    """Reset beta with an objective that takes none, unless a value is given."""
    if "objective" in method and not OBJECTIVES[method["objective"]].takes("beta"):
        method.setdefault("beta", None)


def _of_method(error: Exception) -> str:
    """Return the message of an error in building the method, in terms of settings."""
    if isinstance(error, SettingsError):
        return f"method: {error.wrong} {' '.join(f'--set {k}={as_setting(v)}' for k, v in error.mend.items())}"
    return str(error) if isinstance(error, ConfigError) else f"method: {error}"


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert {"section": {"key": v}} to {"section.key": v}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{key}": v for key, v in value.items()})
        else:
            flat[name] = value
    return flat


@functools.cache
def sections() -> dict[str, type]:
    """Return the section classes of Config by name."""
    hints = typing.get_type_hints(Config)
    return {name: kind for name, kind in hints.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
