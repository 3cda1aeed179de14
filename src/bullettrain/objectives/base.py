"""What an objective is: a corruption and a surrogate loss."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.allocation import Allocation
from bullettrain.attacks import Attack, AttackLoss, Norm, RandomStart, random_noise, starting_point
from bullettrain.attacks.losses import loss_named
from bullettrain.attacks.norms import AUTO, NORMS, USUAL_EPS, Ball, Bounds, Limit, find_norm
from bullettrain.attacks.pgd import AscentFunctions, AttackState, Compile, ascent_step
from bullettrain.attacks.state import Mode, check_mode
from bullettrain.brief import one_line
from bullettrain.cost import Cost
from bullettrain.validation import check_positive, check_range

Adversarial = TypeVar("Adversarial", bound="AdversarialObjective")

Selection = Literal["eval", "train", "last"]
"""Which clean logits select: see :class:`Objective`."""


class Objective(ABC):
    """A corruption, taken in steps, and a loss. The engine asks for its parts in the order of Algorithm 2.

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
    z_of: Literal["x", "start"] = "x"
    """What z is of: the clean examples, or what the corruption starts from (FGSM-PGI)."""
    needs_target = False
    """Whether a step of the corruption looks at clean predictions: :meth:`target_of`."""
    needs_network = True
    """Whether a step of the corruption looks at the network."""
    num_views = 1
    """Corrupted copies of an example that a step makes: AugMix makes two views."""
    max_steps: int | None = None
    """The most steps that make sense; AugMix has one, which is both views."""
    penalty_passes = 0
    """What :meth:`penalty` costs an example."""
    attack_mode: Mode = "eval"
    """Mode of the network during the corruption."""
    whole_step = False
    """Whether corruption and update have to be one piece, since the one uses what the other leaves in Python."""

    def __init__(self, selection: Selection) -> None:
        if selection not in get_args(Selection):
            raise ValueError(f"selection is {selection!r}; logits that select are of 'eval' or 'train' mode, or 'last'")
        self.selection: Selection = selection

    __repr__ = one_line

    @property
    def step_passes(self) -> float:
        """What a step of the corruption costs an example: a forward, and a backward to the input."""
        return 2 if self.needs_network else 0

    @property
    def cost(self) -> Cost:
        """Passes an example that each part costs, as its attributes say."""
        learns, eval_mode = self.has_clean_term, self.selection == "eval"
        return Cost(
            selection=int(eval_mode or not learns),
            target=int(self.needs_target),
            shared=self.needs_target and eval_mode and self.attack_mode == "eval",
            step=self.step_passes,
            clean=3 if learns else 0,
            corrupted=3 * self.num_views,
            untouched=0 if learns else 3,
            penalty=self.penalty_passes,
        )

    @property
    def sees_clean(self) -> bool:
        """Whether a step has training-mode logits of the clean examples."""
        return self.has_clean_term and self.z_of == "x"

    @property
    def unit(self) -> float:
        """What step sizes are computed from: eps, or 1 where eps is a tensor and they are in units of it."""
        return 1.0 if isinstance(self.eps, Tensor) else self.eps

    def check_budget(self, budget: Allocation) -> None:
        """ValueError where it cannot be given these steps."""
        most = max(getattr(budget, name, 0) for name in ("boundary", "robust", "outlier", "most"))
        if self.max_steps is not None and most > self.max_steps:
            raise ValueError(
                f"{type(self).__name__} was given {most} steps; a step is both views, so 1 or 0, as in StepBudget(1, 0)"
            )

    def initial_perturbation(self, x: Tensor) -> Tensor | None:
        """What the corruption of ``x`` (m, …) starts from, drawn anew, as a step takes it by ``start``."""
        return None

    def progress(self, done: float) -> None:  # noqa: B027
        """Told before each mini-batch which part of the training, 0 to 1, is done: what changes over it moves here.

        A captured graph sees what is a tensor, changed in place.
        """

    def target_of(self, logits: Tensor) -> Tensor:
        """What the attack moves away from, (m, K), given the clean logits (m, K): their probabilities."""
        return logits.softmax(dim=1)

    def begin(self, x: Tensor, start: Tensor | None) -> Tensor:
        """x' (m, …), or (num_views, m, …), before the first step of those that have any."""
        return x

    @abstractmethod
    def corrupt(
        self, net: nn.Module, attack: AttackState, rows: Tensor | None, fast: AscentFunctions | None
    ) -> Tensor | None:
        """One step of the corruption: ``attack.x_prime`` is changed in place.

        Args:
            net: the network, frozen in :attr:`attack_mode`; gradients are on.
            attack: the batch, (m, …).
            rows: (n,) which examples; None: all.
            fast: compiled functions, of :meth:`fast_functions`.

        Returns:
            (n, K) logits from before the step, where it has seen any.
        """

    def fast_functions(self, compiled: Compile, like: Tensor) -> AscentFunctions | None:
        """What of :meth:`corrupt` is worth compiling, for a network whose weights are ``like`` this one."""
        return None

    @abstractmethod
    def loss(
        self, z: Tensor | None, z_prime: Tensor, y: Tensor, touched: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """The surrogate loss, a mean over the m examples.

        Args:
            z: (m, K) clean logits.
            z_prime: (m, K) corrupted logits; AugMix: (2, m, K).
            y: (m,) labels.
            touched: (t,) indices of the examples that were corrupted; None: all. The divergence of z and z'
                is computed for these only: where z' is z there is none.
            weight: (m,) of the examples; None: 1 for all.
        """

    def penalty(self, model: nn.Module, x: Tensor, y: Tensor, start: Tensor | None) -> Tensor | None:
        """A term of the loss that has to see the network itself, 0-d; None: there is none.

        Args: as in :meth:`corrupt`, of which ``start`` is the same.
        """
        return None

    def learns_from(self, x: Tensor, x_prime: Tensor) -> Tensor:
        """What the loss is taken of: x', unless its backward has to be watched."""
        return x_prime

    def fill_in(self, z: Tensor, moved: Tensor | None, touched: Tensor | None) -> Tensor:
        """z' (m, K) from z (m, K) and the logits (t, K) of the ``touched`` (t,) examples, or of all, if any."""
        if moved is None:
            return z
        return moved if touched is None else z.index_copy(0, touched, moved.to(z.dtype))

    def check_inputs(self, x: Tensor) -> None:
        """ValueError unless ``x`` (m, …) is within the bounds; waits for the device."""
        check_range(x, self.bounds)

    def check_perturbed(self, x: Tensor, x_prime: Tensor, eps: Tensor | None = None) -> None:  # noqa: B027
        """RuntimeError where x' is not where it may be; waits for the device."""

    def mutable_state(self, x: Tensor) -> list[Tensor]:
        """The tensors that steps on batches of up to ``x`` (m, …) change in place; most have none."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What it keeps from step to step; most keep nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        if state:
            raise ValueError(f"the checkpoint carries {', '.join(state)}, which {type(self).__name__} does not")


class AdversarialObjective(Objective):
    """An objective whose corruption is a PGD attack.

    Args:
        beta: weight of the robust term, where the loss has one; None: the objective's own (:attr:`usual_beta`).
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
    usual_beta: float | None = None
    """β unless given; None: the loss has no such weight."""
    beta: float

    def __init__(
        self,
        *,
        beta: float | None = None,
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
        if beta is not None and self.usual_beta is None:
            raise TypeError(f"{type(self).__name__} has no beta; leave it out")
        if self.usual_beta is not None:
            self.beta = check_positive(self.usual_beta if beta is None else beta, "beta")
        self.attack_mode = check_mode(attack_mode, "attack_mode")
        self.generator = generator
        self.attack = attack

    def attacked_by(self: Adversarial, attack: Attack) -> Adversarial:
        """The same objective with another attack."""
        other = copy.copy(self)
        other.attack = attack
        return other

    @property
    def needs_target(self) -> bool:  # type: ignore[override]
        """Whether the attack's loss is a divergence from the clean prediction."""
        return self.attack_loss == "kl"

    @property
    def step_passes(self) -> float:
        """As its ascent step says: YOPO's is a cheaper stand-in."""
        return self.attack.ascent.passes

    @property
    def start(self) -> RandomStart:
        """Where the attack starts."""
        return self.attack.start or self.random_start

    @property
    def ball(self) -> Ball:
        """Where x' may be."""
        return Ball(self.norm, self.eps, self.bounds, self.attack.project)

    def noise(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """What chance adds to a batch before its attack, shaped as ``like`` (m, …)."""
        return random_noise(self.start, self.ball.on(like), like, self.attack.radius, generator)

    def start_from(self, x: Tensor, noise: Tensor) -> Tensor:
        """Where the attack on ``x`` (m, …) starts, given :meth:`noise`."""
        return starting_point(self.start, x.detach(), noise, self.ball.on(x))

    def initial_perturbation(self, x: Tensor) -> Tensor:
        """Points (m, …) that the attack on ``x`` starts from, drawn anew."""
        return self.start_from(x, self.noise(x, self.generator))

    def begin(self, x: Tensor, start: Tensor | None) -> Tensor:
        """Where the attack starts."""
        assert start is not None
        if start.shape != x.shape:
            raise ValueError(f"start has the shape {tuple(start.shape)}; it has to be x's, {tuple(x.shape)}")
        return start.detach()

    def corrupt(
        self, net: nn.Module, attack: AttackState, rows: Tensor | None, fast: AscentFunctions | None
    ) -> Tensor | None:
        """One ascent step."""
        functions = fast or AscentFunctions(self._attack_loss, self.ball.on(attack.clean))
        return ascent_step(net, attack, rows, functions, self.attack.ascent)

    def fast_functions(self, compiled: Compile, like: Tensor) -> AscentFunctions:
        """The gradient at the logits in closed form, and the move."""
        return AscentFunctions(self._attack_loss, self.ball.on(like, check=False), compiled)

    @property
    def _attack_loss(self) -> AttackLoss:
        return loss_named(self.attack_loss) if isinstance(self.attack_loss, str) else self.attack_loss

    def check_inputs(self, x: Tensor) -> None:
        """``x`` within the bounds."""
        self.ball.check_inputs(x)

    def check_perturbed(self, x: Tensor, x_prime: Tensor, eps: Tensor | None = None) -> None:
        """x' in the ball and within the bounds."""
        self.ball.check_perturbed(x, x_prime, eps)


def cross_entropy(logits: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """The mean over the examples, each by its weight."""
    if weight is None:
        return F.cross_entropy(logits, y)
    return (weight * F.cross_entropy(logits, y, reduction="none")).mean()


def probabilities(logits: Tensor) -> Tensor:
    """Softmax (m, K), above 0: a divergence from exactly 0 has a gradient that is not a number."""
    return F.softmax(logits, dim=1).clamp_min(torch.finfo(logits.dtype).tiny)


def mean_over(values: Tensor, m: int, weight: Tensor | None = None, touched: Tensor | None = None) -> Tensor:
    """Mean over a batch of ``m`` of which only the ``touched`` examples have a value, (t,); the others' is 0."""
    if weight is not None:
        values = values * (weight if touched is None else weight[touched])
    return values.mean() if len(values) == m else values.sum() / m
