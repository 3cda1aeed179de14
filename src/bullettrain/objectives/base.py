"""The interface of objectives: a corruption and a surrogate loss."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.allocation import Allocation, RadiusBudget, ShuffledBudget, StepBudget
from bullettrain.attacks import Attack, AttackLoss, Norm, RandomStart, random_noise, starting_point
from bullettrain.attacks.losses import loss_named
from bullettrain.attacks.norms import AUTO, NORMS, USUAL_EPS, Ball, Bounds, Limit, find_norm
from bullettrain.attacks.pgd import AscentFunctions, AttackState, Compile, ascent_step
from bullettrain.attacks.state import Mode
from bullettrain.brief import one_line
from bullettrain.cost import Cost
from bullettrain.validation import check_known, check_number, check_range, check_start, instead

Constructor = TypeVar("Constructor", bound=Callable[..., None])
Adversarial = TypeVar("Adversarial", bound="AdversarialObjective")

NO_CHANGES = Attack()
Selection = Literal["eval", "train", "last"]
"""Which clean logits select: see :class:`Objective`."""


class Objective(ABC):
    """Base class of objectives: a corruption that is taken in steps, and a loss.

    A subclass needs :meth:`loss` and :meth:`corrupt`; adversarial objectives derive from `AdversarialObjective` and
    need a loss only. Class attributes say what the engine has to provide.

    Args:
        selection: which clean logits select. "eval": those of the network in eval mode. "train": the training-mode
            logits of the loss, which are computed first and kept. "last": the logits that the loss had when the example
            was last trained on, usually one epoch ago. This needs no forward, but steps need ``index``.
    """

    eps: Limit = 1.0
    bounds: Bounds = (0.0, 1.0)
    has_clean_term = True
    """Whether the loss looks at the clean logits z."""
    z_of: Literal["x", "start"] = "x"
    """Whether z are the logits of the clean examples or of the starting points of the attack (FGSM-PGI)."""
    needs_target = False
    """Whether a step of the corruption uses clean predictions, see :meth:`target_of`."""
    needs_network = True
    """Whether a step of the corruption runs the network."""
    num_views = 1
    """Number of corrupted copies of each example; AugMix has two views."""
    uniform_only = False
    """Whether all examples need the same number of steps, at least one."""
    takes_eps = True
    """Whether the corruption projects to a radius that an allocation gives each example."""
    max_steps: int | None = None
    """Largest number of steps; AugMix has one step, which makes both views."""
    moves_per_step = 1
    """How often one step of the corruption moves x'; YOPO's step does so several times."""
    penalty_passes = 0
    """Passes per example of :meth:`penalty`."""
    attack_mode: Mode = "eval"
    """Mode of the network during the attack."""
    one_by_one = False
    """Whether mini-batches are attacked one at a time, because the attack and the update share state."""
    whole_batch = False
    """Whether an example's attack or loss depends on the other examples of the mini-batch."""
    carries_perturbations = False
    """Whether attacks start from perturbations of earlier steps. All of them have to run in one process."""
    moved_by_update = False
    """Whether the backward of an update also moves the perturbations, so that a mini-batch needs its own update."""
    title = ""
    """Name in reports, if it is not that of the class."""
    options: tuple[str, ...] = ()
    """Optional arguments of the constructor that the class takes, see :meth:`takes`."""

    def __init__(self, selection: Selection) -> None:
        self.selection: Selection = check_known(selection, get_args(Selection), "selection is")

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def step_passes(self) -> float:
        """Passes per example of one step of the corruption: a forward, and a backward to the input."""
        return 2 if self.needs_network else 0

    @classmethod
    def takes(cls, option: str) -> bool:
        """Return whether the constructor takes an option, one of :attr:`options`."""
        return option in cls.options

    @property
    def cost(self) -> Cost:
        """Passes per example of each part, derived from the class attributes."""
        learns, eval_mode = self.has_clean_term, self.selection == "eval"
        return Cost(
            selection=int(eval_mode or not self.has_clean_logits),
            target=int(self.needs_target),
            shared=self.needs_target and eval_mode and self.attack_mode == "eval",
            step=self.step_passes,
            clean=3 if learns else 0,
            corrupted=3 * self.num_views,
            untouched=0 if learns else 3,
            penalty=self.penalty_passes,
        )

    @property
    def has_clean_logits(self) -> bool:
        """Whether a step computes training-mode logits of the clean examples."""
        return self.has_clean_term and self.z_of == "x"

    @property
    def unit(self) -> float:
        """Unit of step sizes: eps, or 1 if eps is a tensor, in units of which step sizes then are."""
        return 1.0 if isinstance(self.eps, Tensor) else self.eps

    def check_budget(self, budget: Allocation) -> None:
        """Raise ValueError if the objective does not support this budget."""
        if self.uniform_only and (not budget.uniform_steps or hasattr(budget, "revise")):
            name = type(self).__name__
            raise ValueError(f"{name} needs a budget with the same number of steps for all examples, at least one")
        if hasattr(budget, "revise") and not self.needs_network:
            name, why = type(self).__name__, "whose corruption has no logits to revise steps by"
            raise ValueError(f"the budget revises steps during the attack of {name}, {why}")
        most = max(getattr(budget, name, 0) for name in ("boundary", "robust", "outlier", "max_steps"))
        if self.max_steps is not None and most > self.max_steps:
            name, give = type(self).__name__, "1 or 0, as in StepBudget(1, 0)"
            raise ValueError(f"{name} was given {most} steps; a step is both views, so {give}")

    def initial_perturbation(self, x: Tensor) -> Tensor | None:
        """Draw the starting points of the corruption of ``x`` (m, …), as the argument ``start`` of a step."""
        return None

    def progress(self, done: float) -> None:  # noqa: B027
        """Update schedules of the objective; called before each mini-batch with the part of the training that is done.

        Change tensors in place, so that captured graphs see the change.
        """

    def target_of(self, logits: Tensor) -> Tensor:
        """Return the target (m, K) that the attack moves away from, from clean logits (m, K): their softmax."""
        return logits.softmax(dim=1)

    def begin(self, x: Tensor, start: Tensor | None) -> Tensor:
        """Return x' (m, …), or (num_views, m, …), before the first step."""
        return x

    @abstractmethod
    def corrupt(
        self, net: nn.Module, attack: AttackState, rows: Tensor | None, fast: AscentFunctions | None
    ) -> Tensor | None:
        """Take one step of the corruption; change ``attack.x_prime`` in place.

        Args:
            net: the network, frozen in :attr:`attack_mode`; gradients are enabled.
            attack: the batch of m examples.
            rows: (n,) examples that take the step; None: all.
            fast: result of :meth:`fast_functions`, if compiled.

        Returns:
            (n, K) logits before the step, or None if the network was not run.
        """

    def fast_functions(self, compiled: Compile, like: Tensor) -> AscentFunctions | None:
        """Return the parts of :meth:`corrupt` that are worth compiling, on the device and in the dtype of ``like``."""
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
            touched: (t,) indices of the corrupted examples; None: all. For the others z' is z, so that a divergence
                of the two need not be computed.
            weight: (m,) weights of the examples; None: 1 each.
        """

    def penalty(
        self, model: nn.Module, x: Tensor, y: Tensor, start: Tensor | None, weight: Tensor | None = None
    ) -> Tensor | None:
        """Return a 0-d term of the loss that needs the network itself; None: there is none."""
        return None

    def corrupted_input(self, x: Tensor, x_prime: Tensor) -> Tensor:
        """Return the input of the corrupted forward: x', possibly with a hook on its backward."""
        return x_prime

    def fill_in(self, z: Tensor, corrupted_logits: Tensor | None, touched: Tensor | None) -> Tensor:
        """Return z' (m, K): z (m, K) with ``corrupted_logits`` (t, K) of the ``touched`` (t,) examples filled in."""
        if corrupted_logits is None:
            return z
        return corrupted_logits if touched is None else z.index_copy(0, touched, corrupted_logits.to(z.dtype))

    def check_inputs(self, x: Tensor) -> None:
        """Check that ``x`` (m, …) is within the bounds; synchronises with the device."""
        check_range(x, self.bounds)

    def check_perturbed(self, x: Tensor, x_prime: Tensor, eps: Tensor | None = None) -> None:  # noqa: B027
        """Raise RuntimeError if x' is outside its ball; synchronises with the device."""

    def mutable_state(self, x: Tensor) -> list[Tensor]:
        """Return the tensors that steps on batches of at most the size of ``x`` (m, …) change in place."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is kept from step to step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        if state:
            raise ValueError(f"the checkpoint carries {', '.join(state)}, which {type(self).__name__} does not")


def names_its_class(init: Constructor) -> Constructor:
    """Let errors about the arguments of a constructor, which subclasses share, name the class that is made."""

    @functools.wraps(init)
    def checked(self: AdversarialObjective, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        if args:
            raise TypeError(f"{name} takes its arguments by name, e.g. {name}(eps=8/255)")
        taken = [argument.name for argument in self.arguments()]
        if refused := [key for key in kwargs if key not in taken]:
            others = inspect.signature(init).parameters  # which other objectives take
            mend = "; leave it out" if refused[0] in others else instead(refused[0], taken)
            raise TypeError(f"{name} takes no {refused[0]}{mend}")
        init(self, **kwargs)

    return cast(Constructor, checked)


class AdversarialObjective(Objective):
    """An objective whose corruption is a PGD attack.

    A subclass says which arguments it takes by class attributes (:attr:`usual_beta`, :attr:`options`), and makes its
    own state in :meth:`set_up`.

    Args:
        beta: weight of the robust term, where the loss has one; None: the objective's own (:attr:`usual_beta`).
        eps: radius of the ball; None: 0.031 in L∞. In L∞ it may be a tensor that broadcasts to one example, (C, 1, 1)
            or (D,); step sizes are then in units of it.
        norm: "linf", "l2" or :class:`Normalized`.
        bounds: valid range (low, high) of ``x``, numbers or tensors; None: unbounded. "auto": (0, 1), or the range that
            follows from :class:`Normalized`.
        attack_mode: mode of the network during the attack, "eval" or "train"; None: the objective's default.
        selection: see :class:`Objective`; None: the objective's default.
        generator: generator of the attack's noise.
        attack: start and steps of the attack, if not the objective's own; used by baselines.
        label_smoothing: in [0, 1), of the cross-entropy of the loss, as in PyTorch; the attack's loss has none. A
            subclass whose loss applies ``self.label_smoothing`` names it in :attr:`options`.
    """

    attack_loss: str | AttackLoss = "ce"
    random_start: RandomStart = "normal"
    own_selection: Selection = "eval"
    usual_beta: float | None = None
    """Default of β; None: the loss has no such weight."""
    options: tuple[str, ...] = ("selection", "attack_mode", "generator", "attack")
    beta: float
    reset_epochs = 0
    """Attacks start from the last perturbation of each example, which is drawn anew after so many epochs; 0: they do
    not. The caller keeps the perturbations, see `StoredPerturbations`."""

    @names_its_class
    def __init__(
        self,
        *,
        beta: float | None = None,
        eps: Limit | None = None,
        norm: str | Norm = "linf",
        bounds: Bounds | Literal["auto"] | None = AUTO,
        attack_mode: Mode | None = None,
        selection: Selection | None = None,
        generator: torch.Generator | None = None,
        attack: Attack = NO_CHANGES,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(self.own_selection if selection is None else selection)
        norm = find_norm(norm)
        if eps is None and norm is not NORMS["linf"]:
            usual = f"{USUAL_EPS['linf']}, which it is unless given, is of L∞; in L2 {USUAL_EPS['l2']} is usual"
            raise ValueError(f"give eps as well: {usual}")
        ball = Ball.of(norm, USUAL_EPS["linf"] if eps is None else eps, bounds)
        self.norm, self.eps, self.bounds = ball.norm, ball.eps, ball.bounds
        if doubt := ball.doubt():
            warnings.warn(doubt, stacklevel=3)
        if self.usual_beta is not None:
            self.beta = check_number(self.usual_beta if beta is None else beta, "beta", above=0)
        if attack_mode is not None:
            self.attack_mode = check_known(attack_mode, get_args(Mode), "attack_mode is")
        self.generator = generator
        self.attack = attack
        self.label_smoothing = check_number(label_smoothing, "label_smoothing", least=0, below=1)
        self.set_up()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" not in vars(cls):
            cls.__signature__ = inspect.Signature(cls.arguments())  # type: ignore[attr-defined] # help() shows it

    @classmethod
    def arguments(cls) -> list[inspect.Parameter]:
        """Return the arguments of the constructor that the class takes, with its own defaults."""
        own = {"beta": cls.usual_beta, "selection": cls.own_selection, "attack_mode": cls.attack_mode}
        arguments = list(inspect.signature(AdversarialObjective.__init__).parameters.values())[1:]
        taken = [a for a in arguments if a.name not in ("beta", *SMOOTHED) or cls.takes(a.name)]
        return [a.replace(default=own.get(a.name, a.default)) for a in taken]

    def __repr__(self) -> str:
        return one_line(self, [option for option in SMOOTHED if not self.takes(option)])

    def set_up(self) -> None:
        """Check the arguments and make the state of a subclass; called at the end of the constructor."""

    @classmethod
    def takes(cls, option: str) -> bool:
        """Return whether the constructor takes an option, one of :attr:`options` or "beta"."""
        return cls.usual_beta is not None if option == "beta" else option in cls.options

    def attacked_by(self: Adversarial, attack: Attack) -> Adversarial:
        """Return the same objective with another attack."""
        other = copy.copy(self)
        other.attack = attack
        return other

    def check_budget(self, budget: Allocation) -> None:
        """Also refuse a budget whose eps is not the objective's, and steps across the ball and the range of pixels."""
        super().check_budget(budget)
        part: Any = budget
        while part is not None:
            if isinstance(part, StepBudget):
                self.ball.check_step(part.boundary_step(self.unit), "the boundary step size")
            if isinstance(part, RadiusBudget) and not (self.takes_eps or isinstance(self.eps, Tensor)):
                raise ValueError(f"RadiusBudget gives each example an eps, but {type(self).__name__} does not project")
            if isinstance(part, (RadiusBudget, ShuffledBudget)):
                name, own = type(part).__name__, self.unit if isinstance(part, ShuffledBudget) else self.eps
                if isinstance(own, Tensor):
                    raise ValueError(f"{name} needs a number for eps, and {type(self).__name__} has a tensor")
                if not math.isclose(part.eps, own, rel_tol=1e-6):
                    wrong = f"{name} has eps {part.eps:g}, but {type(self).__name__} has {own:g}"
                    raise ValueError(f"{wrong}; give both the same")
            part = getattr(part, "budget", None)  # of a shuffled one

    @property
    def takes_eps(self) -> bool:  # type: ignore[override]
        """Whether attacks project, to a radius that is a number."""
        return self.needs_network and self.attack.project and not isinstance(self.eps, Tensor)

    @property
    def needs_target(self) -> bool:  # type: ignore[override]
        """Whether the attack maximises the divergence from the clean prediction."""
        return self.attack_loss == "kl"

    @property
    def step_passes(self) -> float:
        """Passes per example of one ascent step; YOPO's is cheaper."""
        return self.attack.ascent.passes

    @property
    def moves_per_step(self) -> int:  # type: ignore[override]
        """Moves of one ascent step."""
        return getattr(self.attack.ascent, "updates", 1)

    @property
    def start(self) -> RandomStart:
        """Where the attack starts."""
        return self.attack.start or self.random_start

    @property
    def ball(self) -> Ball:
        """The ball and bounds of x'."""
        return Ball(self.norm, self.eps, self.bounds, self.attack.project)

    def noise(self, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw the noise of the starting points, shaped like ``like`` (m, …)."""
        return random_noise(self.start, self.ball.on(like), like, self.attack.radius, generator)

    def start_from(self, x: Tensor, noise: Tensor) -> Tensor:
        """Return the starting points of the attack on ``x`` (m, …), from the result of :meth:`noise`."""
        return starting_point(self.start, x.detach(), noise, self.ball.on(x))

    def initial_perturbation(self, x: Tensor) -> Tensor:
        """Draw starting points (m, …) of the attack on ``x``."""
        return self.start_from(x, self.noise(x, self.generator))

    def begin(self, x: Tensor, start: Tensor | None) -> Tensor:
        """Return the starting points."""
        assert start is not None
        return check_start(start, x)

    def corrupt(
        self, net: nn.Module, attack: AttackState, rows: Tensor | None, fast: AscentFunctions | None
    ) -> Tensor | None:
        """Take one ascent step."""
        functions = fast or AscentFunctions(self._attack_loss, self.ball.on(attack.clean))
        return ascent_step(net, attack, rows, functions, self.attack.ascent, self.attack.stop_at_success)

    def fast_functions(self, compiled: Compile, like: Tensor) -> AscentFunctions:
        """Return the gradient at the logits, in closed form, and the move."""
        return AscentFunctions(self._attack_loss, self.ball.on(like, check=False), compiled)

    @property
    def _attack_loss(self) -> AttackLoss:
        return loss_named(self.attack_loss) if isinstance(self.attack_loss, str) else self.attack_loss

    def check_inputs(self, x: Tensor) -> None:
        """Check that ``x`` is within the bounds."""
        self.ball.check_inputs(x)

    def check_perturbed(self, x: Tensor, x_prime: Tensor, eps: Tensor | None = None) -> None:
        """Check that x' is in the ball and within the bounds."""
        self.ball.check_perturbed(x, x_prime, eps)


SMOOTHED = (*AdversarialObjective.options, "label_smoothing")
"""Options of an objective whose loss applies ``self.label_smoothing``."""


def cross_entropy(logits: Tensor, y: Tensor, weight: Tensor | None, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy, weighted by example."""
    if weight is None:
        return F.cross_entropy(logits, y, label_smoothing=label_smoothing)
    return (weight * F.cross_entropy(logits, y, reduction="none", label_smoothing=label_smoothing)).mean()


def probabilities(logits: Tensor) -> Tensor:
    """Return the softmax (m, K), clamped above 0: the gradient of a divergence from exactly 0 is NaN."""
    return F.softmax(logits, dim=1).clamp_min(torch.finfo(logits.dtype).tiny)


def mean_over(values: Tensor, m: int, weight: Tensor | None = None, touched: Tensor | None = None) -> Tensor:
    """Return the mean over ``m`` examples of which only the ``touched`` ones have a value (t,); the others have 0."""
    if weight is not None:
        values = values * (weight if touched is None else weight[touched])
    return values.mean() if len(values) == m else values.sum() / m
