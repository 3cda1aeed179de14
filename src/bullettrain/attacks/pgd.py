"""Projected gradient ascent, with a number of steps for each example."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from bullettrain.attacks.ascent import WHOLE_NETWORK, AscentStep
from bullettrain.attacks.losses import AttackLoss, closed_form, gradient_at_logits, loss_named
from bullettrain.attacks.norms import AUTO, Ball, Bounds, Limit, Norm, per_example
from bullettrain.attacks.schedule import ragged
from bullettrain.attacks.state import Mode, bare, frozen, underflows
from bullettrain.mining import is_correct
from bullettrain.precision import at_least_float32
from bullettrain.validation import (
    check_batch,
    check_count,
    check_known,
    check_logits_shape,
    check_module,
    check_number,
    check_start,
)

RandomStart = Literal["uniform", "normal", "clipped", "bernoulli", "zero"]
"""Starting point of an attack: uniform in the ball; x + 0.001·N(0,1); uniform, clipped to valid pixels; a random corner
of the ball, clipped to valid pixels; x itself."""


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
    ascent: AscentStep = WHOLE_NETWORK,
    check: bool = True,
) -> Tensor:
    """Attack each example with its number of ascent steps.

    Iteration t forwards only the examples with more than t steps. Examples without steps are returned unchanged. The
    network is left as it was.

    Args:
        model: returns logits (n, K) for any n.
        x: (m, …) clean examples, within ``bounds``.
        y: (m,) labels.
        eps: radius of the ball around ``x``; in L∞ also a tensor that broadcasts to one example, (C, 1, 1) or (D,);
            step sizes are then in units of it.
        steps: a number for all examples, or (m,) integers.
        step_size: a number for all examples, or (m,).
        norm: "linf", "l2" or :class:`Normalized`.
        loss: "ce", "kl" or "margin", or a function of (logits, labels, target) that returns (n,).
        target: (m, K) probabilities for "kl".
        random_start: "uniform" in the ball, "normal" (x + 0.001·N(0,1), as TRADES and MART do), "clipped"
            (uniform, then clipped to ``bounds``), "bernoulli" (each value by −eps or eps, then clipped), or None or
            "zero" (x itself).
        start: (m, …) starting points instead of a random start.
        generator: generator of the noise. Noise is drawn for the whole batch, so that an example's noise does not
            depend on the steps of others.
        bounds: valid range (low, high) of ``x``, numbers or tensors; None: unbounded. "auto": (0, 1), or the range that
            follows from :class:`Normalized`.
        mode: mode of the network during the attack.
        project: project each step into the ball. False: only into ``bounds``.
        ascent: how one step is taken; by default through the whole network.
        check: check that ``x`` is within ``bounds``; synchronises with the device.

    Returns:
        (m, …) corrupted examples, detached.
    """
    check_module(model)
    check_batch(x, y)
    ball = dataclasses.replace(Ball.of(norm, eps, bounds), projects=project)
    if not torch.is_tensor(step_size):
        check_number(step_size, "step_size", above=0)
        ball.check_step(step_size, "step_size")
    elif step_size.shape not in ((), (len(x),)):
        raise ValueError(f"step_size has the shape {tuple(step_size.shape)}; {len(x)} examples need ({len(x)},)")
    if target is not None and (target.ndim != 2 or len(target) != len(x)):
        raise ValueError(f"target has the shape {tuple(target.shape)}; it has to be ({len(x)}, K)")
    ball = ball.on(x)
    if check:
        ball.check_inputs(x)
        if torch.is_tensor(step_size) and not bool((step_size >= 0).all()):
            raise ValueError("step_size has values that are negative or NaN")
    attack_loss = loss_named(loss) if isinstance(loss, str) else loss
    x = x.detach()
    counts = _host_counts(steps, len(x))  # the host has to know how the batch shrinks
    if not any(counts):
        return x.clone()
    if start is None:
        kind = random_start or "zero"
        start = starting_point(kind, x, random_noise(kind, ball, x, generator=generator), ball)
    start = check_start(start, x)
    number = steps.expand(len(x)) if torch.is_tensor(steps) else torch.full((len(x),), counts[0], device=x.device)
    number = number.to(x.device, non_blocking=True)
    sizes = step_size if torch.is_tensor(step_size) else torch.full((), step_size, dtype=x.dtype, device=x.device)
    attack = AttackState(
        x_prime=torch.where(per_example(number > 0, x, torch.bool), start, x),
        clean=x,
        labels=y,
        target=None if target is None else target.detach(),
        size=per_example(sizes.to(x.device).expand(len(x)), x),
    )
    net = bare(model)
    functions = AscentFunctions(attack_loss, ball)
    with frozen(net, mode), torch.enable_grad():
        for rows in ragged(number, counts):
            ascent_step(net, attack, rows, functions, ascent)
    return attack.x_prime


class AttackState(NamedTuple):
    """The state of an attack: tensors with one row per example."""

    x_prime: Tensor
    """(m, …) current points; changed in place."""
    clean: Tensor
    """(m, …)."""
    labels: Tensor
    """(m,)."""
    target: Tensor | None
    """(m, K) target of the attack loss, if it has one."""
    size: Tensor
    """(m, 1, …) step sizes."""
    eps: Tensor | None = None
    """(m, 1, …) radii, if each example has its own."""
    start: Tensor | None = None
    """For AugMix: random draws (m, …), or views (2, m, …)."""

    def x_prime_of(self, rows: slice) -> Tensor:
        """Return x' of these rows, (n, …) or (num_views, n, …)."""
        x_prime = self.x_prime.detach()
        return x_prime[rows] if x_prime.ndim == self.clean.ndim else x_prime[:, rows]

    def with_spare(self) -> AttackState:
        """Return the state with one spare row, which idle places read and write."""
        return self._by_rows(lambda tensor, dim: torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim))

    def without_spare(self) -> AttackState:
        """Return the state without its last row."""
        return self._by_rows(lambda tensor, dim: tensor.narrow(dim, 0, len(self.labels) - 1))

    def _by_rows(self, change: Callable[[Tensor, int], Tensor]) -> AttackState:
        """Apply ``change`` to each tensor and its dimension of examples: 1 for views (2, m, …), else 0."""
        one = tuple(self.clean.shape)
        return AttackState(*(None if t is None else change(t, int(tuple(t.shape[1:]) == one)) for t in self))  # type: ignore[arg-type]


Compile = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
"""Compiles a function of tensors, or returns it unchanged."""


class AscentFunctions:
    """The parts of an attack step around the network: the gradient at the logits, and the move.

    Args:
        loss: the attack loss.
        ball: ball and bounds.
        compiled: compiles both, with the gradient in closed form and the indexing of rows inside the kernels; None: the
            gradient is autograd's, and nothing is compiled.
    """

    def __init__(self, loss: AttackLoss, ball: Ball, compiled: Compile | None = None) -> None:
        at_logits = partial(gradient_at_logits, loss) if compiled is None else closed_form(loss)

        def gradient(logits: Tensor, labels: Tensor, target: Tensor | None, rows: Tensor | None) -> Tensor:
            return at_logits(logits, take(labels, rows), None if target is None else take(target, rows))

        def move(
            images: Tensor, to_input: Tensor, clean: Tensor, size: Tensor, eps: Tensor | None, rows: Tensor | None
        ) -> Tensor:
            radius = None if eps is None else take(eps, rows)
            return ball.step(images, take(clean, rows), to_input, take(size, rows), radius)

        self.gradient: Callable[..., Tensor] = gradient if compiled is None else compiled(gradient)
        self.move: Callable[..., Tensor] = move if compiled is None else compiled(move)


def ascent_step(
    net: nn.Module,
    attack: AttackState,
    rows: Tensor | None,
    functions: AscentFunctions,
    ascent: AscentStep = WHOLE_NETWORK,
    stop_at_success: bool = False,
) -> Tensor:
    """Take one ascent step for some rows, or for all; ``attack.x_prime`` is changed in place.

    Args:
        net: the network, frozen in the attack's mode; gradients are enabled.
        attack: the batch.
        rows: (n,) examples that take the step; None: all.
        functions: gradient at the logits, and move.
        ascent: how a step is taken.
        stop_at_success: examples that are misclassified before the step do not take it.

    Returns:
        (n, K) logits before the step.
    """

    def gradient(logits: Tensor) -> Tensor:
        check_logits_shape(logits, len(attack.labels) if rows is None else len(rows))
        found = functions.gradient(at_least_float32(logits.detach()), attack.labels, attack.target, rows)
        # In float16 small gradients would become 0; a power of two does not change the direction.
        return (found * 1024 if underflows(logits.device) else found).to(logits.dtype)

    def move(images: Tensor, to_input: Tensor) -> Tensor:
        return functions.move(images, to_input, attack.clean, attack.size, attack.eps, rows)

    before = take(attack.x_prime, rows)
    x_prime, logits = ascent(net, before, gradient, move)
    if stop_at_success:
        moves = is_correct(logits, take(attack.labels, rows))
        # A step of length 0 still clips a starting point to the ball and to valid pixels.
        x_prime = torch.where(per_example(moves, before, torch.bool), x_prime, move(before, torch.zeros_like(before)))
    if rows is None:
        attack.x_prime.copy_(x_prime)
    else:
        attack.x_prime.index_copy_(0, rows, x_prime)
    return logits


def take(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return these rows (n, …), or all, in the memory format of ``values``, which `index_select` would not keep."""
    if rows is None:
        return values
    if values.ndim == 4 and values.is_contiguous(memory_format=torch.channels_last):
        return values.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
    return values.index_select(0, rows)


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
    """Draw the noise of a random start for ``x`` (m, …); ``radius`` is in units of eps."""
    if kind in ("uniform", "clipped"):
        return ball.norm.noise(x, radius * ball.eps, generator)
    if kind == "bernoulli":
        signs = 2 * torch.empty_like(x).bernoulli_(0.5, generator=generator) - 1
        return radius * ball.eps * ball.norm.direction(signs)
    if kind == "normal":
        return 0.001 * torch.empty_like(x).normal_(generator=generator)
    check_start_kind(kind)
    return torch.zeros_like(x)


def check_start_kind(kind: RandomStart) -> None:
    """Check the name of a random start."""
    kinds = get_args(RandomStart)
    check_known(kind, kinds, "there is no random start", listed=f"there are {', '.join(kinds)} and None")


def starting_point(kind: RandomStart, x: Tensor, noise: Tensor, ball: Ball) -> Tensor:
    """Return starting points (m, …): ``x`` plus noise, clipped if the kind says so."""
    start = x + noise
    return ball.norm.clip(start, ball.bounds) if kind in ("clipped", "bernoulli") else start


@dataclass(frozen=True)
class Attack:
    """Start and steps of an attack, for objectives that are attacked in another way than their own.

    Args:
        start: see :data:`RandomStart`; None: the objective's.
        radius: radius of a uniform or Bernoulli start, in units of eps.
        project: project each step into the ball. False: only to valid pixels.
        ascent: how a step is taken.
        stop_at_success: the attack on an example stops at the first point that is misclassified. Its further steps do
            not move it, but cost as much.
    """

    start: RandomStart | None = None
    radius: float = 1.0
    project: bool = True
    ascent: AscentStep = WHOLE_NETWORK
    stop_at_success: bool = False

    def __post_init__(self) -> None:
        check_number(self.radius, "radius", above=0)
        if self.start is not None:
            check_start_kind(self.start)
