"""Accuracy in rounds: each round attacks the images that the rounds before have not broken. Float32 decides."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bullettrain.attacks import bare, frozen, pgd
from bullettrain.attacks.pgd import RandomStart
from bullettrain.attacks.state import uncompiled
from bullettrain.augmix import ViewMaker
from bullettrain.config.settings import ConfigError
from bullettrain.data import ImageSet, to_unit
from bullettrain.data.base import derive_seed
from bullettrain.evaluation.specs import PGD
from bullettrain.loading import try_network
from bullettrain.precision import arithmetic, at_least_float32
from bullettrain.validation import described

# ------------------------------------------------------------------------------------------------ the network


class EvaluatedModel(nn.Module):
    """A network as attacks see it: logits (m, K) in float32 of images (m, C, H, W), computed in ``dtype``.

    Attacks search in ``dtype``; :func:`float32_logits` decides how an image is classified. Only images get gradients.
    Compiled, there are two programs, with and without a gradient, each for any batch size.

    Args:
        network: network in eval mode.
        dtype: float32, or bfloat16 by autocast, as in training.
        compiled: whether to compile the network.
    """

    def __init__(self, network: nn.Module, *, dtype: torch.dtype = torch.float32, compiled: bool = False) -> None:
        super().__init__()
        self.network: nn.Module = torch.compile(network) if compiled else network  # type: ignore[assignment]
        self.dtype, self.is_compiled = dtype, compiled

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of ``x``."""
        if channels_last(x.device) and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        network = self.network
        if self.is_compiled and len(x) == 1:  # would be compiled separately
            network = uncompiled(network)
        elif self.is_compiled:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        wanted, half = torch.is_grad_enabled() and x.requires_grad, self.dtype != torch.float32
        with torch.set_grad_enabled(wanted), torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            logits: Tensor = network(x)
        return at_least_float32(logits) if torch.is_tensor(logits) else logits

    @property
    def exact(self) -> nn.Module:
        """The same network, not compiled and in float32."""
        return EvaluatedModel(uncompiled(self.network))


def float32_logits(model: nn.Module, x: Tensor) -> Tensor:
    """Return logits (m, K) of x (m, C, H, W) in eval mode, without TF32 or bfloat16 for an :class:`EvaluatedModel`."""
    exact = isinstance(model, EvaluatedModel)
    model = model.exact if isinstance(model, EvaluatedModel) else model
    with frozen(model), torch.no_grad(), arithmetic("float32") if exact else nullcontext():
        logits: Tensor = model(x)
    return logits


def is_right(logits: Tensor, y: Tensor) -> Tensor:
    """Return (m,) bool: whether the largest of logits (m, K) is y (m,). Logits with NaN are wrong."""
    return (logits.argmax(dim=1) == y) & logits.isfinite().all(dim=1)


def correct(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return (m,) bool: which of x (m, C, H, W) the network, in eval mode, classifies as y (m,)."""
    return is_right(float32_logits(model, x), y)


def channels_last(device: torch.device) -> bool:
    """Return whether to store images channels last, which is fastest on GPUs."""
    return device.type == "cuda"


def prepare(network: nn.Module, images: ImageSet, *, device: torch.device, data: str) -> nn.Module:
    """Move ``network`` to ``device``, in eval mode and without gradients for its weights, and try it on two images.

    Raises:
        ConfigError: the network does not fit the dataset ``data``.
    """
    network = network.to(device).eval().requires_grad_(False)
    if channels_last(device):
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = to_unit(images.images[:2].to(device), channels_last=channels_last(device))
    logits = try_network(network, x, f"the images of {data}")
    if logits.shape[1] != len(images.classes):
        wrong = f"the network has {logits.shape[1]} classes, but {data} has {len(images.classes)}"
        raise ConfigError(f"{wrong}; give the dataset that it was trained on with --data")
    if not torch.isfinite(logits).all():
        raise ConfigError("the network returns NaN or infinite logits; look at its weights")
    return network


# -------------------------------------------------------------------------------------------- which images survive


@dataclass(frozen=True)
class Round:
    """One pass over the images: clean, one restart of an attack, or one attack of an ensemble."""

    name: str
    survives: Callable[[Tensor, Tensor, int], Tensor]
    """``survives(x (m, C, H, W), y (m,), seed) -> (m,)`` bool: images of a batch that stay correctly classified."""
    passes: int = 1
    """Cost of an image, relative to other rounds."""
    even: bool = False
    """Whether to split the images into batches of nearly equal size, at most the batch size."""

    def size(self, images: int, batch_size: int) -> int:
        """Return the size of a batch, given the number of images."""
        return -(-images // max(-(-images // batch_size), 1)) if self.even else batch_size


@dataclass
class Survival:
    """State of an attack, from which it can resume after any batch.

    ``alive`` (n,) bool, on the CPU: images that are still classified correctly. ``pending`` (n,) bool: images that the
    current round started with; ``batches`` of their batches are done.
    """

    alive: Tensor
    pending: Tensor
    batches: int = 0
    shares: list[float] = field(default_factory=list)
    """Accuracy after each finished round."""

    @classmethod
    def fresh(cls, n: int) -> Survival:
        """Return the state of ``n`` images before the first round."""
        return cls(torch.ones(n, dtype=torch.bool), torch.ones(n, dtype=torch.bool))

    @property
    def share(self) -> float:
        """Share of the images that are still classified correctly."""
        return int(self.alive.sum()) / len(self.alive)

    def end_round(self) -> None:
        """Finish a round. The next one starts with the surviving images."""
        self.shares.append(self.share)
        self.pending, self.batches = self.alive.clone(), 0

    def left(self, rounds: Sequence[Round], batch_size: int) -> int:
        """Estimate the passes left: as many of the round's other images survive as so far, and later rounds break none.

        Before a round's first batch that is an upper bound.
        """
        if len(self.shares) == len(rounds):
            return 0
        current, *later = rounds[len(self.shares) :]
        pending = int(self.pending.sum())
        done = min(self.batches * current.size(pending, batch_size), pending)
        lost = pending - int(self.alive.sum())
        survivors = round(pending * (1 - lost / done)) if done else pending
        return (pending - done) * current.passes + sum(part.passes for part in later) * survivors


def survive(
    rounds: Sequence[Round],
    data: ImageSet,
    *,
    device: torch.device,
    batch_size: int = 500,
    seed: int = 0,
    channels_last: bool = False,
    state: Survival | None = None,
    tick: Callable[[int], None] = lambda passes: None,
) -> Survival:
    """Run ``rounds`` on ``data``. An image that a round breaks is not attacked again.

    The batches of a round are filled with the survivors of the round before. The seed of a batch depends only on
    ``seed``, its round and its index. Several processes share the batches.

    Args:
        rounds: rounds, in order.
        data: n images.
        device: device to run on.
        batch_size: images per batch.
        seed: seed of all noise.
        channels_last: whether to store images channels last.
        state: state to resume from, changed in place; by default, start from the first round.
        tick: called after each batch with the number of its passes, and after each round with 0.

    Returns:
        The state after the last round.
    """
    state = state or Survival.fresh(len(data))
    together = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    for number in range(len(state.shares), len(rounds)):
        rows = state.pending.nonzero()[:, 0]
        size = rounds[number].size(len(rows), batch_size)
        for index in range(state.batches, -(-len(rows) // max(size, 1))):
            part = rows[index * size : (index + 1) * size]
            if index % world == rank:
                x = to_unit(data.images[part].to(device), channels_last=channels_last)
                y = data.labels[part].to(device)
                survived = rounds[number].survives(x, y, derive_seed(seed, number, index))
                state.alive[part] = survived.to("cpu", torch.bool)
            state.batches = index + 1
            tick(len(part) * rounds[number].passes)
        if together:
            alive = state.alive.to(device, torch.uint8)
            dist.all_reduce(alive, op=dist.ReduceOp.MIN)
            state.alive = alive.to("cpu", torch.bool)
        state.end_round()
        tick(0)
    return state


# --------------------------------------------------------------------------------------------------- the rounds


def clean_round(model: nn.Module) -> Round:
    """Return the round that classifies the images as they are."""
    net = bare(model)
    return Round("clean", lambda x, y, seed: correct(net, x, y))


def attacked(net: nn.Module, x: Tensor, y: Tensor, attack: PGD, seed: int, **how: Any) -> Tensor:
    """Return x (m, C, H, W) with labels y (m,) after one restart; ``how``: other arguments of :func:`pgd`."""
    target = None
    if attack.loss == "kl":
        with frozen(net), torch.no_grad():
            target = at_least_float32(net(x)).softmax(dim=1)
    return pgd(
        net,
        x,
        y,
        eps=attack.eps,
        steps=attack.steps,
        step_size=attack.step,
        norm=attack.norm,
        loss=attack.loss,
        target=target,
        generator=torch.Generator(x.device).manual_seed(seed),
        check=False,  # uint8 images are always valid
        **how,
    )


def pgd_rounds(model: nn.Module, attack: PGD, *, random_start: RandomStart | None = "uniform") -> list[Round]:
    """Return one round per restart. An image survives if the last iterate is classified correctly."""
    net = bare(model)

    def survives(x: Tensor, y: Tensor, seed: int) -> Tensor:
        return correct(net, attacked(net, x, y, attack, seed, random_start=random_start), y)

    names = [f"restart {number + 1}" for number in range(attack.restarts)] if attack.restarts > 1 else ["pgd"]
    return [Round(name, survives) for name in names]


def view_round(model: nn.Module, views: ViewMaker) -> Round:
    """Return the round that classifies one AugMix view of each image."""
    net = bare(model)

    def survives(x: Tensor, y: Tensor, seed: int) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(seed)
        return correct(net, views(x, views.draw(len(x), 1, generator=generator, device=x.device))[0], y)

    return Round("views", survives)


def clean_accuracy(
    model: nn.Module, data: ImageSet, *, device: torch.device | None = None, batch_size: int = 500
) -> float:
    """Return the share of ``data`` that the network classifies correctly, in eval mode and float32.

    Args:
        model: returns logits (m, K) of images (m, C, H, W) in [0, 1].
        data: labelled images.
        device: of the network; by default, that of its parameters.
        batch_size: images per batch.
    """
    _check_images(data)
    return survive([clean_round(model)], data, device=device or _device(model), batch_size=batch_size).share


def robust_accuracy(
    model: nn.Module,
    data: ImageSet,
    attack: PGD,
    *,
    device: torch.device | None = None,
    batch_size: int = 500,
    seed: int = 0,
) -> float:
    """Return the share of ``data`` that is classified correctly, clean and after every restart of ``attack``.

    An image that is already misclassified is not attacked again. Warns if the steps of ``attack`` do not reach the edge
    of its ball.

    Args:
        model: returns logits (m, K) of images (m, C, H, W) in [0, 1].
        data: labelled images.
        attack: the attack.
        device: of the network; by default, that of its parameters.
        batch_size: images per batch.
        seed: the noise of a batch depends only on it, the restart and the index of the batch.
    """
    _check_images(data)
    if attack.shortfall:
        warnings.warn(attack.shortfall, stacklevel=2)
    rounds = [clean_round(model), *pgd_rounds(model, attack)]
    return survive(rounds, data, device=device or _device(model), batch_size=batch_size, seed=seed).share


def _check_images(data: object) -> None:
    if not isinstance(data, ImageSet):
        give = "bullettrain.data.ImageSet(images uint8 (n, C, H, W), labels int64 (n,), classes)"
        raise TypeError(f"data is {described(data)}; give {give}")


def _device(model: nn.Module) -> torch.device:
    """Return the device of the network's parameters, or of its buffers; the CPU if it has neither."""
    return next((t.device for t in itertools.chain(model.parameters(), model.buffers())), torch.device("cpu"))
