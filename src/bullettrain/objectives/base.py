"""What an objective is: a corruption and a surrogate loss, with the forwards that they share."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from bullettrain.allocation import Cost
from bullettrain.attacks import (
    Attack,
    AttackLoss,
    Norm,
    RandomStart,
    bare,
    frozen,
    pgd,
    random_noise,
    starting_point,
)
from bullettrain.attacks.losses import loss_named
from bullettrain.attacks.norms import AUTO, NORMS, USUAL_EPS, Ball, Bounds, Limit, find_norm
from bullettrain.attacks.state import Mode, check_mode, forward_some, training
from bullettrain.brief import one_line
from bullettrain.checks import check_logits_shape, check_positive, check_range

Adversarial = TypeVar("Adversarial", bound="AdversarialObjective")

Selection = Literal["eval", "train", "last"]
"""Which clean logits select: see :class:`Objective`."""


class Objective(ABC):
    """The parts of one training step, in the order in which Algorithm 2 uses them.

    Args:
        selection: which clean logits select. "eval": of the network in eval mode. "train": the training-mode
            logits of the loss, computed first and kept. "last": those that the loss had of the example when it was
            last trained on, mostly an epoch ago: nothing is forwarded to select, and steps are told which examples
            they see.
    """

    eps: Limit = 1.0
    bounds: Bounds = (0.0, 1.0)
    has_clean_term = True
    """Whether the loss looks at the clean logits z."""
    copies = 1
    """Corrupted copies of an example that a step makes: AugMix makes two views."""

    @property
    def unit(self) -> float:
        """What step sizes are computed from: eps, or 1 where eps is a tensor and they are in units of it."""
        return 1.0 if isinstance(self.eps, Tensor) else self.eps

    def __init__(self, selection: Selection) -> None:
        if selection not in get_args(Selection):
            raise ValueError(f"selection is {selection!r}; logits that select are of 'eval' or 'train' mode, or 'last'")
        self.selection: Selection = selection

    __repr__ = one_line

    @property
    @abstractmethod
    def cost(self) -> Cost:
        """Passes an example that each part costs."""

    @property
    def not_grouped(self) -> str | None:
        """Why the group engine cannot take its steps, where it cannot."""
        return None

    def selection_logits(self, model: nn.Module, x: Tensor) -> Tensor:
        """s (m, K) = h(x), which select; with their graph where they are the loss's own."""
        if self.selection == "train" and self.has_clean_term:
            return forward(model, x)
        return self._logits_held(model, x, "train" if self.selection == "train" else "eval")

    @abstractmethod
    def corrupt(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        s: Tensor | None,
        steps: Tensor,
        step_sizes: Tensor,
        *,
        start: Tensor | None = None,
    ) -> Tensor:
        """x' = G(x): as many steps an example as ``steps`` (m,), a tensor on the host, says; none: untouched."""

    def clean_logits(self, model: nn.Module, x: Tensor, s: Tensor | None) -> Tensor | None:
        """z (m, K) = h(x) in training mode: s itself where it is that; None where the loss has no z."""
        if not self.has_clean_term:
            return None
        return s if s is not None and self.selection == "train" else forward(model, x)

    def corrupted_logits(self, model: nn.Module, x_prime: Tensor, z: Tensor | None, steps: Tensor) -> Tensor:
        """z' (m, K) = h(x') in training mode. Without steps z' = z: such examples are not forwarded again."""
        if z is None:
            return forward(model, x_prime)
        rows = steps.nonzero()[:, 0]
        everyone = len(rows) == len(z)
        # Of everyone the device knows by itself: nothing is sent there, and a CUDA graph can hold it.
        rows = torch.arange(len(z), device=z.device) if everyone else rows.to(z.device, non_blocking=True)
        # The wrapper of several workers has seen this step's first forward, and syncs gradients of both.
        moved = forward(bare(model), x_prime if everyone else x_prime[rows]) if len(rows) else None
        return self.fill_in(z, moved, rows)

    def fill_in(self, z: Tensor, moved: Tensor | None, rows: Tensor) -> Tensor:
        """z' (m, K) from z (m, K) and the logits (t, K) of the ``rows`` (t,) that were corrupted, if any."""
        if moved is None or len(rows) == len(z):
            return z if moved is None else moved
        return z.index_copy(0, rows, moved.to(z.dtype))

    @abstractmethod
    def loss(self, z: Tensor | None, z_prime: Tensor, y: Tensor, touched: Tensor | None = None) -> Tensor:
        """The surrogate loss, a mean over the m examples.

        Args:
            z: (m, K) clean logits.
            z_prime: (m, K) corrupted logits; AugMix: (2, m, K).
            y: (m,) labels.
            touched: (t,) indices of the examples that were corrupted; None: all. The divergence of z and z'
                is computed for these only: where z' is z there is none.
        """

    def penalty(self, model: nn.Module, x: Tensor, y: Tensor, start: Tensor | None) -> Tensor | None:
        """A term of the loss that has to see the network itself, 0-d; None: there is none.

        Args: as in :meth:`corrupt`, of which ``start`` is the same.
        """
        return None

    def check_inputs(self, x: Tensor) -> None:
        """ValueError unless ``x`` (m, …) is within the bounds; waits for the device."""
        check_range(x, self.bounds)

    def check_perturbed(self, x: Tensor, x_prime: Tensor) -> None:  # noqa: B027 (not every corruption has limits)
        """RuntimeError where x' is not where it may be; waits for the device."""

    def opening(self, x: Tensor) -> Tensor | None:
        """What the corruption of ``x`` (m, …) starts from, drawn anew, as :meth:`corrupt` takes it; None: nothing."""
        return None

    def carried(self, x: Tensor) -> list[Tensor]:
        """The tensors that steps on batches of up to ``x`` (m, …) change in place; most carry nothing."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What it carries from step to step; most carry nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        if state:
            raise ValueError(f"the checkpoint carries {', '.join(state)}, which {type(self).__name__} does not")

    @staticmethod
    def _logits_held(model: nn.Module, x: Tensor, mode: Mode) -> Tensor:
        net = bare(model)
        with frozen(net, mode), torch.no_grad():
            logits: Tensor = net(x)
        check_logits_shape(logits, len(x))
        return logits


class AdversarialObjective(Objective):
    """An objective whose corruption is a PGD attack.

    Args:
        eps: radius of the ball; None: 0.031, which is of L∞ alone. In L∞ also a tensor that broadcasts to one example,
            (C, 1, 1) or (D,), in units of which step sizes then are.
        norm: "linf", "l2" or :class:`Normalized`.
        bounds: valid range of ``x``, numbers or tensors as ``eps``; None: any is. "auto": (0, 1), or what follows from
            :class:`Normalized`.
        attack_mode: mode of the network during the attack; the TRADES and MART authors have it in eval mode.
        selection: see :class:`Objective`; None: the objective's own choice.
        generator: source of the attack's noise.
        attack: how it starts and moves, where not as the objective's authors have it; the baselines need that.
    """

    attack_loss: str | AttackLoss = "ce"
    random_start: RandomStart = "normal"
    own_selection: Selection = "eval"

    def __init__(
        self,
        *,
        eps: Limit | None = None,
        norm: str | Norm = "linf",
        bounds: Bounds | Literal["auto"] | None = AUTO,
        attack_mode: Mode = "eval",
        selection: Selection | None = None,
        generator: torch.Generator | None = None,
        attack: Attack = Attack(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(self.own_selection if selection is None else selection)
        norm = find_norm(norm)
        linf = norm is NORMS["linf"]
        if eps is None and not linf:
            usual = f"{USUAL_EPS['linf']}, which it is unless given, is of L∞; in L2 {USUAL_EPS['l2']} is usual"
            raise ValueError(f"give eps as well: {usual}")
        ball = Ball.of(norm, USUAL_EPS["linf"] if eps is None else eps, bounds)
        self.norm, self.eps, self.bounds = ball.norm, ball.eps, ball.bounds
        low, high = self.bounds
        if linf and bool(torch.as_tensor(self.eps > high - low).any()):
            raise ValueError(f"eps is {eps:g}, but pixels are in [{low:g}, {high:g}]; did you mean {eps:g}/255?")
        self.attack_mode: Mode = check_mode(attack_mode, "attack_mode")
        self.generator = generator
        self.attack = attack

    def attacked_by(self: Adversarial, attack: Attack) -> Adversarial:
        """The same objective with another attack."""
        other = copy.copy(self)
        other.attack = attack
        return other

    @property
    def start(self) -> RandomStart:
        """Where the attack starts."""
        return self.attack.start or self.random_start

    @property
    def ascended(self) -> AttackLoss:
        """What the attack makes large."""
        return loss_named(self.attack_loss) if isinstance(self.attack_loss, str) else self.attack_loss

    @property
    def ball(self) -> Ball:
        """Where x' may be."""
        return Ball(self.norm, self.eps, self.bounds, self.attack.project)

    def check_inputs(self, x: Tensor) -> None:
        """``x`` within the bounds."""
        self.ball.check_inputs(x)

    def check_perturbed(self, x: Tensor, x_prime: Tensor) -> None:
        """x' in the ball and within the bounds."""
        self.ball.check_perturbed(x, x_prime)

    @property
    def not_grouped(self) -> str | None:
        """Why the group engine cannot take its steps, where it cannot."""
        return self.attack.climb.not_grouped

    def noise(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """What chance adds to a batch before its attack, shaped as ``like`` (m, …)."""
        return random_noise(self.start, self.ball.on(like), like, self.attack.radius, generator)

    def opening(self, x: Tensor) -> Tensor:
        """Points (m, …) that the attack on ``x`` starts from, drawn anew."""
        return self.begin(x.detach(), self.noise(x, self.generator))

    def begin(self, x: Tensor, noise: Tensor) -> Tensor:
        """Where the attack on ``x`` (m, …) starts, given :meth:`noise`: what :meth:`corrupt` takes as ``start``."""
        return starting_point(self.start, x, noise, self.ball.on(x))

    def corrupt(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        s: Tensor | None,
        steps: Tensor,
        step_sizes: Tensor,
        *,
        start: Tensor | None = None,
    ) -> Tensor:
        """x' by PGD, (m, …)."""
        if start is None and steps.any():
            start = self.opening(x)
        return pgd(
            model,
            x,
            y,
            eps=self.eps,
            steps=steps,
            step_size=step_sizes,
            norm=self.norm,
            loss=self.ascended,
            target=self.attack_target(model, x, s) if steps.any() else None,
            start=start,
            bounds=self.bounds,
            mode=self.attack_mode,
            project=self.attack.project,
            climb=self.attack.climb,
            check=False,  # the engine looks at x once in a while
        )

    def attack_target(self, model: nn.Module, x: Tensor, s: Tensor | None) -> Tensor | None:
        """Probabilities (m, K) that the attack moves away from, where it does not use the labels."""
        return None


class RegularizedObjective(AdversarialObjective):
    """An attack, and a loss with a robust term of weight β.

    Args:
        beta: weight of the robust term.
        Others: see :class:`AdversarialObjective`.
    """

    def __init__(
        self,
        *,
        beta: float = 6.0,
        eps: Limit | None = None,
        norm: str | Norm = "linf",
        bounds: Bounds | Literal["auto"] | None = AUTO,
        attack_mode: Mode = "eval",
        selection: Selection | None = None,
        generator: torch.Generator | None = None,
        attack: Attack = Attack(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(
            eps=eps,
            norm=norm,
            bounds=bounds,
            attack_mode=attack_mode,
            selection=selection,
            generator=generator,
            attack=attack,
        )
        self.beta = check_positive(beta, "beta")


def forward(model: nn.Module, x: Tensor) -> Tensor:
    """Training-mode logits (n, K); their shape is checked."""
    with training(model):
        logits = forward_some(model, x)
    check_logits_shape(logits, len(x))
    return logits


def mean_over(values: Tensor, m: int) -> Tensor:
    """Mean over a batch of ``m`` of which only some examples have a value, (t,); the others' is 0."""
    return values.mean() if len(values) == m else values.sum() / m
