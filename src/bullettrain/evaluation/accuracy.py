"""Accuracy: rounds of attacks, each on the images that the rounds before have left; float32 decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

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

# ------------------------------------------------------------------------------------------------ the network


class EvaluatedModel(nn.Module):
    """Logits (m, K) in float32 of images (m, C, H, W), whatever precision they are computed in.

    Attacks search in that precision; what an image is classified as is decided by :func:`float32_logits`.

    Gradients go to the images alone. However they are asked for, there are two programs to compile, with a gradient
    and without, each for every m.

    Args:
        network: in eval mode.
        dtype: float32, or bfloat16 by autocast, as in training.
        compiled: whether to compile the network.
    """

    def __init__(self, network: nn.Module, *, dtype: torch.dtype = torch.float32, compiled: bool = False) -> None:
        super().__init__()
        self.network: nn.Module = torch.compile(network) if compiled else network  # type: ignore[assignment]
        self.dtype, self.is_compiled = dtype, compiled

    def forward(self, x: Tensor) -> Tensor:
        """Logits of ``x``."""
        if channels_last(x.device) and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        network = self.network
        if self.is_compiled and len(x) == 1:  # it would be a program of its own
            network = uncompiled(network)
        elif self.is_compiled:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        wanted, half = torch.is_grad_enabled() and x.requires_grad, self.dtype != torch.float32
        with torch.set_grad_enabled(wanted), torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            logits: Tensor = network(x)
        return at_least_float32(logits) if torch.is_tensor(logits) else logits

    @property
    def exact(self) -> nn.Module:
        """The same network, not compiled and not in half precision."""
        return EvaluatedModel(uncompiled(self.network))


def float32_logits(model: nn.Module, x: Tensor) -> Tensor:
    """Logits (m, K) of x (m, C, H, W) in eval mode, that decide what x is classified as: in real float32."""
    exactly = arithmetic("float32") if isinstance(model, EvaluatedModel) else nullcontext()
    model = model.exact if isinstance(model, EvaluatedModel) else model
    with frozen(model), torch.no_grad(), exactly:
        logits: Tensor = model(x)
    return logits


def is_right(logits: Tensor, y: Tensor) -> Tensor:
    """(m,) bool: whether logits (m, K) say y (m,)."""
    return (logits.argmax(dim=1) == y) & logits.isfinite().all(dim=1)  # argmax takes NaN for the largest


def correct(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """(m,) bool: which of x (m, C, H, W) the network, in eval mode, classifies as y (m,); NaN is no answer."""
    return is_right(float32_logits(model, x), y)


def channels_last(device: torch.device) -> bool:
    """Whether images lie channels last in memory: what GPUs convolve fastest."""
    return device.type == "cuda"


def prepare(network: nn.Module, images: ImageSet, *, device: torch.device, data: str) -> nn.Module:
    """``network`` on its device, in eval mode, without gradients for its weights, tried on two of ``images``.

    Raises:
        ConfigError: it does not go with the dataset, which is called ``data``.
    """
    network = network.to(device).eval().requires_grad_(False)
    if channels_last(device):
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = to_unit(images.images[:2].to(device), channels_last=channels_last(device))
    logits = try_network(network, x, f"the images of {data}")
    if logits.shape[1] != len(images.classes):
        raise ConfigError(
            f"the network has {logits.shape[1]} classes, but {data} has {len(images.classes)}; "
            "give the dataset that it was trained on with --data"
        )
    if not torch.isfinite(logits).all():
        raise ConfigError("the network returns NaN or infinite logits; look at its weights")
    return network


# -------------------------------------------------------------------------------------------- which images survive


@dataclass(frozen=True)
class Round:
    """One look at the images: as they are, one restart of an attack, or one attack of an ensemble."""

    name: str
    survives: Callable[[Tensor, Tensor, int], Tensor]
    """``survives(x (m, C, H, W), y (m,), seed) -> (m,)`` bool: which of a batch the round does not break."""
    passes: int = 1
    """What an image costs, relative to other rounds."""
    even: bool = False
    """Whether batches are all of nearly one size, which is at most the one that is asked for."""

    def size(self, images: int, batch_size: int) -> int:
        """Images in a batch where there are so many in all."""
        return -(-images // max(-(-images // batch_size), 1)) if self.even else batch_size


@dataclass
class Survival:
    """How far an attack has come: enough to go on from between any two batches.

    ``alive`` (n,) bool, on the CPU: images that are classified correctly so far. ``pending`` (n,): those that
    the round under way began with, in batches of which ``batches`` are done.
    """

    alive: Tensor
    pending: Tensor
    batches: int = 0
    shares: list[float] = field(default_factory=list)
    """Share of all images alive after each finished round."""

    @classmethod
    def fresh(cls, n: int) -> Survival:
        """Nothing has been looked at yet."""
        return cls(torch.ones(n, dtype=torch.bool), torch.ones(n, dtype=torch.bool))

    @property
    def share(self) -> float:
        """Share of all images that are alive."""
        return int(self.alive.sum()) / len(self.alive)

    def end_round(self) -> None:
        """All batches of a round are done: the next begins with what is alive."""
        self.shares.append(self.share)
        self.pending, self.batches = self.alive.clone(), 0

    def left(self, rounds: Sequence[Round], batch_size: int) -> int:
        """Passes, at most, until the last of ``rounds`` is done: what a progress bar needs."""
        if len(self.shares) == len(rounds):
            return 0
        now, *later = rounds[len(self.shares) :]
        pending = int(self.pending.sum())
        begun = max(pending - self.batches * now.size(pending, batch_size), 0)
        return begun * now.passes + sum(part.passes for part in later) * int(self.alive.sum())


def survive(
    rounds: Sequence[Round],
    data: ImageSet,
    *,
    device: torch.device,
    batch_size: int = 500,
    seed: int = 0,
    channels_last: bool = False,
    state: Survival | None = None,
    tick: Callable[[int], None] | None = None,
) -> Survival:
    """Put ``data`` through ``rounds``; what a round breaks is not attacked again.

    The survivors of all batches fill the batches of the next round, so that they stay full. A batch's seed
    depends on ``seed``, its round and its place alone. Several processes take turns at the batches.

    Args:
        rounds: in order; all of them see the same seed, their own number and batch number.
        data: n images.
        device: where they are attacked.
        batch_size: images at once.
        seed: of all noise.
        channels_last: how images lie in memory.
        state: to go on from; it is changed, so that it can be kept. None: from the start.
        tick: told after each batch how many passes it took, of the clean round and of PGD its images, and 0 after each
            round.

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
            if tick is not None:
                tick(len(part) * rounds[number].passes)
        if together:
            alive = state.alive.to(device, torch.uint8)
            dist.all_reduce(alive, op=dist.ReduceOp.MIN)
            state.alive = alive.to("cpu", torch.bool)
        state.end_round()
        if tick is not None:
            tick(0)
    return state


# --------------------------------------------------------------------------------------------------- the rounds


def clean_round(model: nn.Module) -> Round:
    """The images as they are."""
    net = bare(model)
    return Round("clean", lambda x, y, seed: correct(net, x, y))


def pgd_rounds(model: nn.Module, attack: PGD, *, random_start: RandomStart | None = "uniform") -> list[Round]:
    """One round a restart; an image survives where the last iterate is classified correctly."""
    net = bare(model)

    def survives(x: Tensor, y: Tensor, seed: int) -> Tensor:
        target = None
        if attack.loss == "kl":
            with frozen(net), torch.no_grad():
                target = at_least_float32(net(x)).softmax(dim=1)
        x_adv = pgd(
            net,
            x,
            y,
            eps=attack.eps,
            steps=attack.steps,
            step_size=attack.step,
            norm=attack.norm,
            loss=attack.loss,
            target=target,
            random_start=random_start,
            generator=torch.Generator(x.device).manual_seed(seed),
            check=False,  # the images come from bytes
        )
        return correct(net, x_adv, y)

    names = [f"restart {number + 1}" for number in range(attack.restarts)] if attack.restarts > 1 else ["pgd"]
    return [Round(name, survives) for name in names]


def view_round(model: nn.Module, views: ViewMaker) -> Round:
    """One AugMix view of each image."""
    net = bare(model)

    def survives(x: Tensor, y: Tensor, seed: int) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(seed)
        return correct(net, views(x, views.draw(len(x), 1, generator=generator, device=x.device))[0], y)

    return Round("views", survives)


def clean_accuracy(model: nn.Module, data: ImageSet, *, device: torch.device, batch_size: int = 500) -> float:
    """Share of ``data`` that the network, in eval mode and float32, classifies correctly."""
    return survive([clean_round(model)], data, device=device, batch_size=batch_size).share


def robust_accuracy(
    model: nn.Module, data: ImageSet, attack: PGD, *, device: torch.device, batch_size: int = 500, seed: int = 0
) -> float:
    """Share of ``data`` that survives every restart of ``attack``.

    Images that are lost already, clean or in an earlier restart, are not attacked again. The noise of a batch
    depends on ``seed``, the restart and the batch's place alone.
    """
    rounds = [clean_round(model), *pgd_rounds(model, attack)]
    return survive(rounds, data, device=device, batch_size=batch_size, seed=seed).share


def view_accuracy(
    model: nn.Module, data: ImageSet, views: ViewMaker, *, device: torch.device, batch_size: int = 500, seed: int = 0
) -> float:
    """Share of ``data`` that is classified correctly as an AugMix view; what is drawn depends on ``seed`` alone."""
    return survive([view_round(model, views)], data, device=device, batch_size=batch_size, seed=seed).share
