"""Projected gradient ascent with a step count of its own for every example: one visible loop."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from bullettrain.attacks.climb import WHOLE_NETWORK, Climb
from bullettrain.attacks.losses import AttackLoss, loss_named
from bullettrain.attacks.norms import AUTO, Ball, Bounds, Limit, Norm, per_example
from bullettrain.attacks.state import Mode, bare, frozen, underflows
from bullettrain.checks import (
    check_batch,
    check_count,
    check_logits_shape,
    check_module,
    check_positive,
)
from bullettrain.precision import wide

RandomStart = Literal["uniform", "normal", "clipped", "zero"]
"""Where an attack starts: uniform in the ball; x + 0.001·N(0,1); uniform, clipped to valid pixels; x itself."""


def pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: Limit,
    steps: int | Tensor,
    step_size: float | Tensor,
    norm: str | Norm = "linf",
    loss: str | AttackLoss = "ce",
    target: Tensor | None = None,
    random_start: RandomStart | None = "uniform",
    start: Tensor | None = None,
    generator: torch.Generator | None = None,
    bounds: Bounds | Literal["auto"] | None = AUTO,
    mode: Mode = "eval",
    project: bool = True,
    climb: Climb = WHOLE_NETWORK,
    check: bool = True,
) -> Tensor:
    """Corrupt each example by as many ascent steps as it is given.

    At iteration t only the examples with more than t steps are forwarded: the batch really shrinks. Examples
    without steps come back untouched. The network is left exactly as it was found.

    Args:
        model: returns logits (n, K) for any n.
        x: (m, …) clean examples, within ``bounds``.
        y: (m,) labels.
        eps: radius of the ball around ``x``; in L∞ also a tensor that broadcasts to one example, (C, 1, 1) or (D,),
            in units of which step sizes then are.
        steps: one number for all, or (m,) integers.
        step_size: one number for all, or (m,).
        norm: "linf", "l2" or :class:`Normalized`.
        loss: "ce", "kl" or "margin", or a function of (logits, labels, target) that returns (n,).
        target: (m, K) probabilities for "kl"; not tracked.
        random_start: "uniform" in the ball, "normal" (x + 0.001·N(0,1), as TRADES and MART do), "clipped"
            (uniform, then clipped to ``bounds``), or None, which is "zero": from x itself.
        start: (m, …) points to start from instead; given as they are.
        generator: source of the noise. Noise is drawn for the whole batch, so that an example's noise does
            not depend on how many steps the others get.
        bounds: valid range of ``x``, numbers or tensors as ``eps``; None: any is. "auto": (0, 1), or what follows
            from :class:`Normalized`.
        mode: of the network during the attack.
        project: bring each step back into the ball. False: into ``bounds`` only.
        climb: how one step is taken; the usual one goes through the whole network.
        check: refuse an ``x`` outside ``bounds``, for which there is no valid answer; waits for the device.

    Returns:
        (m, …) corrupted examples, detached.
    """
    check_module(model)
    check_batch(x, y)
    if not torch.is_tensor(step_size):
        check_positive(step_size, "step_size")
    ball = dataclasses.replace(Ball.of(norm, eps, bounds), projects=project).on(x)
    if check:
        ball.check_inputs(x)
    ascend = loss_named(loss) if isinstance(loss, str) else loss
    x = x.detach()
    counts = _host_counts(steps, len(x))  # the one thing the host has to know: how the batch shrinks
    if not any(counts):
        return x.clone()
    if start is None:
        kind = random_start or "zero"
        start = starting_point(kind, x, random_noise(kind, ball, x, generator=generator), ball)
    elif start.shape != x.shape:
        raise ValueError(f"start has the shape {tuple(start.shape)}; it has to be x's, {tuple(x.shape)}")

    # Most steps first, so that the examples still under attack are always the first ones. Stable: with equal
    # steps for everyone nothing moves, and the batch is the plain algorithm's.
    order = sorted(range(len(counts)), key=lambda i: -counts[i])
    steps_left = [counts[i] for i in order if counts[i]]
    attacked = _Rows(order[: len(steps_left)], x)
    clean, labels = attacked.take(x), attacked.take(y)
    goal = None if target is None else attacked.take(target.detach())
    x_adv = attacked.take(start.detach()).clone()
    sizes = step_size if torch.is_tensor(step_size) else torch.full((), step_size, dtype=x.dtype, device=x.device)
    size = per_example(attacked.take(sizes.to(x.device).expand(len(x))), x)

    net = bare(model)
    with frozen(net, mode), torch.enable_grad():
        n = len(steps_left)

        def value(logits: Tensor) -> Tensor:
            check_logits_shape(logits, n)
            total = ascend(wide(logits), labels[:n], None if goal is None else goal[:n]).sum()
            # A power of two changes no direction; float16 would round small gradients to 0 without it.
            return total * 1024 if underflows(x.device) else total

        def move(images: Tensor, gradient: Tensor) -> Tensor:
            return ball.step(images, clean[:n], gradient, size[:n])

        for t in range(steps_left[0]):
            while steps_left[n - 1] <= t:
                n -= 1
            x_adv[:n] = climb(net, x_adv[:n], value, move)
    return attacked.put(x_adv, x)


class _Rows:
    """Some rows of a batch, in an order of their own; nothing is copied where that is all rows as they are."""

    def __init__(self, rows: list[int], batch: Tensor) -> None:
        everything = rows == list(range(len(batch)))
        self.index = None if everything else torch.tensor(rows).to(batch.device, non_blocking=True)
        self.format = torch.contiguous_format
        if batch.ndim == 4 and batch.is_contiguous(memory_format=torch.channels_last):
            self.format = torch.channels_last

    def take(self, t: Tensor) -> Tensor:
        if self.index is None:
            return t
        rows = t.index_select(0, self.index)
        return rows.contiguous(memory_format=self.format) if rows.ndim == 4 else rows

    def put(self, rows: Tensor, batch: Tensor) -> Tensor:
        return rows if self.index is None else batch.clone().index_copy_(0, self.index, rows)


def _host_counts(steps: int | Tensor, m: int) -> list[int]:
    if not torch.is_tensor(steps):
        return [check_count(steps, "steps")] * m
    if steps.is_floating_point() or steps.dtype == torch.bool:
        raise TypeError(f"steps are {steps.dtype}; give whole numbers, an integer tensor")
    if steps.ndim and steps.shape != (m,):
        raise ValueError(f"steps have the shape {tuple(steps.shape)}; {m} examples need ({m},)")
    counts: list[int] = steps.expand(m).tolist()
    check_count(min(counts), "steps")
    return counts


def random_noise(
    kind: RandomStart, ball: Ball, x: Tensor, radius: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """What a random start adds to ``x`` (m, …); ``radius`` of a uniform one is in units of eps."""
    if kind in ("uniform", "clipped"):
        return ball.norm.noise(x, radius * ball.eps, generator)
    if kind == "normal":
        return 0.001 * torch.empty_like(x).normal_(generator=generator)
    if kind == "zero":
        return torch.zeros_like(x)
    raise ValueError(f"there is no random start {kind!r}; there are 'uniform', 'normal', 'clipped', 'zero' and None")


def starting_point(kind: RandomStart, x: Tensor, noise: Tensor, ball: Ball) -> Tensor:
    """Where an attack starts, (m, …): ``x`` and its noise."""
    start = x + noise
    return ball.norm.clip(start, ball.bounds) if kind == "clipped" else start


@dataclass(frozen=True)
class Attack:
    """How an objective's attack starts and moves, where it is not the objective's own way.

    Args:
        start: see :data:`RandomStart`; None: the objective's own.
        radius: of a uniform start, in units of eps.
        project: bring each step back into the ball of eps. False: into valid pixels only.
        climb: how a step is taken.
    """

    start: RandomStart | None = None
    radius: float = 1.0
    project: bool = True
    climb: Climb = WHOLE_NETWORK

    def __post_init__(self) -> None:
        check_positive(self.radius, "radius")
