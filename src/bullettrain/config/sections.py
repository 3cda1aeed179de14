"""What a run is: typed, written down, and changed by `--set section.key=value`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bullettrain.allocation import selects
from bullettrain.attacks.norms import NORMS, USUAL_EPS
from bullettrain.config.format1 import FORMER
from bullettrain.config.method import MethodConfig
from bullettrain.config.settings import TINY, ConfigError, as_setting, check_limits, find, limited, parse
from bullettrain.engine.cuda_graphs import CUDNN_BENCHMARK_AFTER
from bullettrain.schema import SchemaError, conform
from bullettrain.validation import MendableError


@dataclass(frozen=True)
class DataConfig:
    """The images."""

    name: str = "digits"
    """digits, mnist, cifar10, cifar100, folder:PATH or npz:PATH."""
    validation: int = limited(0, 0, 1e9)
    """Training images held out to choose the best epoch."""
    crop: int = limited(0, 0, 1024)
    """Zero padding before a random crop; 0: none."""
    flip: bool = False
    """Random horizontal flips."""
    views: bool | float = limited(False, 0, 1)
    """Each image, or this share of them, comes as one AugMix view of itself, as AugMix's others are where it trains."""
    train_size: int = limited(0, 0, 1e9)
    """Use only so many training images (every class in proportion); 0: all."""
    test_size: int = limited(0, 0, 1e9)
    """Use only so many test images; 0: all."""
    image_size: int | None = limited(None, 1, 4096)
    """Side to which the images of a folder are resized; null: as they are."""


@dataclass(frozen=True)
class NetworkConfig:
    """The network."""

    name: str = "small-cnn"
    """small-cnn, preact-resnet-18, wrn-D-W, package.module:function or timm:NAME."""
    mean: tuple[float, ...] | None = None
    """Normalisation inside the network, one value a channel; null: none."""
    std: tuple[float, ...] | None = None
    """Standard deviations, with mean."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    """The optimiser."""
    lr: float = limited(0.1, TINY, 1e30)
    """Learning rate, the highest of its schedule."""
    momentum: float = limited(0.9, 0, 0.999999)
    """Momentum of SGD."""
    nesterov: bool = False
    """Nesterov momentum, of SGD."""
    weight_decay: float = limited(0.0, 0, 1e30)
    """Weight decay; adamw's is decoupled from the gradient."""
    decay_norms: bool = True
    """Whether weight decay also holds for norms and biases."""
    clip: float = limited(0.0, 0, 1e30)
    """Largest norm of the gradient; 0: not clipped."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over time; always a function of the step alone."""

    name: Literal["constant", "step", "one-cycle", "cosine"] = "constant"
    """How the learning rate moves over the steps."""
    milestones: tuple[int, ...] = limited((), 1, 1e6)
    """step: epochs, counted from 1, at whose start the rate is multiplied by factor."""
    factor: float = limited(0.1, TINY, 1e30)
    """step: what the rate is multiplied by at each milestone."""
    warmup: float = limited(0.3, 0, 1)
    """one-cycle: share of the steps on the way up from 0; then linearly down to 0."""
    final: float = limited(0.0, 0, 1e30)
    """cosine: rate that the half wave ends at."""


@dataclass(frozen=True)
class TrainingConfig:
    """The training loop."""

    epochs: int = limited(30, 1, 1e6)
    """Passes over the training images."""
    batch_size: int = limited(128, 1, 1e6)
    """Images in a mini-batch, over all processes together."""
    seed: int = limited(0, 0, 2**63 - 1)
    """Seed of everything random."""
    engine: Literal["auto", "eager", "graphs"] = "auto"
    """graphs: captured CUDA graphs. auto: graphs on a GPU, else eager."""
    attack_group: int = limited(1, 1, 1024)
    """Mini-batches that are attacked at once, with the same weights; 1 is the paper."""
    paired_forward: bool = True
    """Compiled with graphs: one forward for the clean and the corrupted examples, each with its own statistics."""
    size_multiple: int = limited(8, 1, 1e6)
    """With graphs, numbers of attacked examples are rounded up to a multiple of this."""
    cudnn_benchmark_after: float = limited(CUDNN_BENCHMARK_AFTER, 0, 1e30)
    """With graphs in bf16, seconds that a size runs before cuDNN tries its convolutions for it; 0: at once."""
    accumulate: int = limited(1, 1, 10_000)
    """Mini-batches to one update of the weights."""
    replays: int = limited(1, 1, 10_000)
    """Times in a row that each mini-batch is trained on; Free: 8, with an eighth of the epochs."""
    precision: Literal["auto", "float32", "bf16"] = "float32"
    """auto: bf16 autocast on GPUs that have it, else float32."""
    channels_last: bool = False
    """Whether images and weights lie channels last in memory, which GPUs convolve faster."""
    compile: bool = False
    """Whether the network is compiled with torch.compile."""
    average: float = limited(0.999, 0, 0.9999999)
    """Decay of the weight average, n / (n + 9) at most in update n; 0: none is kept."""
    threads: int = limited(0, 0, 1024)
    """CPU threads of torch; 0: its own choice."""
    log_every: int = limited(50, 1, 1e9)
    """Steps between two records of an epoch, the last of which has the rest; values stay on the device until then."""
    save_minutes: float = limited(10.0, 0, 1e9)
    """Time between checkpoints within an epoch; one is written at every epoch's end."""
    probe: int = limited(256, 0, 1e9)
    """Training images on which PGD-10 looks for collapse after each epoch; 0: no probe."""


@dataclass(frozen=True)
class EvaluationConfig:
    """The evaluation at the end of training."""

    batch_size: int = limited(500, 1, 1e6)
    """Images at once."""
    search: Literal["float32", "tf32", "bf16"] = "float32"
    """Precision in which attacks search; what an image is taken for is decided in float32 all the same."""
    steps: int = limited(20, 1, 100_000)
    """Steps of the PGD attack on the test images."""
    step_size: float | None = limited(None, TINY, 1e30)
    """Its step size; null: 0.003 at eps 0.031, else eps/10, and more where so few steps would not cross the ball."""
    restarts: int = limited(1, 1, 10_000)
    """Its restarts; an image is right where it withstands all of them."""


SPEED = ("engine", "paired_forward", "size_multiple", "channels_last", "compile", "threads")
NOT_LEARNT = {
    f"training.{key}"
    for key in (*SPEED, "cudnn_benchmark_after", "seed", "average", "log_every", "save_minutes", "probe")
} | {
    *("evaluation.batch_size", "evaluation.search"),
}
"""Settings that do not change what is learnt: how long it takes (SPEED), and how a run is recorded and evaluated."""
MINED_ALONE = {"method.gamma", "method.momentum"}
"""Settings that mean nothing where all get the same steps."""


@dataclass(frozen=True)
class Config:
    """A whole run."""

    recipe: str = "digits"
    """What the run is called after: a recipe of `bullettrain train --list`, or a file."""
    data: DataConfig = field(default_factory=DataConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        for name in sections():
            check_limits(name, getattr(self, name))
        if self.method.norm not in NORMS:
            raise ConfigError(f"method.norm is {self.method.norm!r}; there are {', '.join(NORMS)}")
        if self.method.norm == "linf" and self.method.eps > 1:
            raise ConfigError(
                f"method.eps is {self.method.eps:g}, but pixels are in [0, 1]; did you mean {self.method.eps:g}/255?"
            )
        if self.optimizer.nesterov and not self.optimizer.momentum:
            raise ConfigError("optimizer.nesterov is set without momentum; set optimizer.momentum, e.g. to 0.9")
        if self.method.carry and self.training.accumulate > 1:
            raise ConfigError("method.carry (Free) moves with every update; training.accumulate has to be 1")
        try:
            self.method.build()
        except ConfigError:
            raise
        except MendableError as error:
            mend = " ".join(f"--set {key}={as_setting(value)}" for key, value in error.mend.items())
            raise ConfigError(f"method: {error.wrong} {mend}") from None
        except (ValueError, TypeError) as error:
            raise ConfigError(f"method: {error}") from None

    def doubts(self) -> list[str]:
        """What can be run so, but hardly is what is wanted, a line each."""
        doubts = [self.method.falls_short()]
        if self.method.selection == "last" and self.training.epochs == 1:
            doubts.append("selection=last knows nobody in the first epoch: all are on the boundary, as in a baseline")
        return [doubt for doubt in doubts if doubt is not None]

    def baseline(self) -> Config:
        """The same recipe with the full number of steps for everyone."""
        full = self.method.boundary
        plain = {"separation": "quantile", "allocation": "categories", "allocation_value": None, "shuffled": False}
        return self.replace_section("method", robust=full, outlier=full, **plain)

    def replace_section(self, section: str, **changes: Any) -> Config:
        """A copy with some keys of one section changed."""
        return dataclasses.replace(self, **{section: dataclasses.replace(getattr(self, section), **changes)})

    def to_dict(self) -> dict[str, Any]:
        """Plain mappings, lists and scalars, for YAML."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    @classmethod
    def from_dict(cls, values: Any) -> Config:
        """A config from :meth:`to_dict`, or as a person writes it: missing settings have their defaults.

        Raises:
            ConfigError: a setting is unknown, of another type, or out of its range.
        """
        if isinstance(values, Mapping):
            values = {name: value for name, value in values.items() if name not in ("format", "environment")}
        try:
            config: Config = conform(values, cls, text=parse)
        except SchemaError as error:
            raise ConfigError(str(error)) from None
        return config

    def with_settings(self, settings: Sequence[str]) -> Config:
        """A copy with `section.key=value` applied; a key that is in one section only needs no section."""
        changes: dict[str, dict[str, Any]] = {}
        for setting in settings:
            path, equals, text = setting.partition("=")
            if not equals:
                raise ConfigError(f"--set {setting}: write key=value, e.g. --set method.eps=8/255")
            section, key, hint = find(path.strip(), sections())
            changes.setdefault(section, {})[key] = parse(text.strip(), hint, f"{section}.{key}")
        self._keep_to_eps(changes)
        # All at once: settings may only make sense together.
        changed = {name: dataclasses.replace(getattr(self, name), **values) for name, values in changes.items()}
        return dataclasses.replace(self, **changed)

    def _keep_to_eps(self, changes: dict[str, dict[str, Any]]) -> None:
        """An eps is of its norm, and evaluation.step_size of its eps: where one changes, so must the other."""
        method = changes.get("method", {})
        norm, eps = method.get("norm", self.method.norm), method.get("eps", self.method.eps)
        if norm != self.method.norm and norm in NORMS and "eps" not in method:
            both = f"set both, e.g. --set eps={USUAL_EPS[norm]}"
            raise ConfigError(f"method.norm is {norm}, and eps {eps:g} is of {self.method.norm}; {both}")
        if eps != self.method.eps:
            changes.setdefault("evaluation", {}).setdefault("step_size", None)

    def differences(self, other: Config) -> dict[str, tuple[Any, Any]]:
        """Settings that differ, whatever the recipe is called: by "section.key", the value here and the value there."""
        mine, theirs = flatten(self.to_dict()), flatten(other.to_dict())
        return {key: (mine[key], theirs[key]) for key in mine if mine[key] != theirs[key] and key != "recipe"}

    def identity(self) -> str:
        """Changes with what is learnt and how it is evaluated; not with the seed, nor with settings left alone."""
        usual = flatten(Config().to_dict())
        idle = NOT_LEARNT if selects(self.method.allocator()) else NOT_LEARNT | MINED_ALONE
        changed = {
            FORMER.get(key, key): value  # so that runs on record are found by the names they have
            for key, value in flatten(self.to_dict()).items()
            if value != usual[key] and key not in idle
        }
        text = json.dumps(changed, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()[:8]


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"section": {"key": v}} as {"section.key": v}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{key}": v for key, v in value.items()})
        else:
            flat[name] = value
    return flat


@functools.cache
def sections() -> dict[str, type]:
    """The sections of a configuration, by name."""
    hints = typing.get_type_hints(Config)
    return {name: kind for name, kind in hints.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
