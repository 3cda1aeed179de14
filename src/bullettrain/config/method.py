"""What is trained for, and how the effort is spent: the section ``method`` of a config, as an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import bullettrain as bt
from bullettrain.allocation import Allocation, ShuffledBudget, StepBudget
from bullettrain.attacks import Attack
from bullettrain.augmix import ViewMaker
from bullettrain.baselines import FGSMPGI, GAT, FirstLayer, Free, GradAlign, NuAT
from bullettrain.config.settings import TINY, ConfigError, as_setting, limited
from bullettrain.objectives import AdversarialObjective

ADVERSARIAL: dict[str, type[AdversarialObjective]] = {"pgd-at": bt.PGDAT, "trades": bt.TRADES, "mart": bt.MART}
GUIDED: dict[str, type[GAT] | type[FGSMPGI]] = {"gat": GAT, "nuat": NuAT, "fgsm-pgi": FGSMPGI}
SCORES = {
    "svar": bt.signed_prediction_variance,
    "cross-entropy": bt.signed_cross_entropy,
    "margin": bt.signed_margin,
    "gradient-norm": bt.signed_gradient_norm,
    "random": bt.random_score,
}


@dataclass(frozen=True)
class Threat:
    """The perturbations that a network is trained to withstand: those of at most ``eps`` in ``norm``."""

    norm: Literal["linf", "l2"]
    eps: float


@dataclass(frozen=True)
class MethodConfig:
    """The objective, and how BulletTrain spends the effort on it."""

    objective: Literal["pgd-at", "trades", "mart", "augmix", "gat", "nuat", "fgsm-pgi"] = "trades"
    """The loss that is minimised, and the attack that goes with it."""
    eps: float = 0.031
    """Radius of the perturbations that are trained against, for pixels in [0, 1]; 8/255 is a number too."""
    norm: str = "linf"
    """Norm of the radius: linf or l2."""
    beta: float | None = None
    """Weight of the robust term; null: the objective's own."""
    boundary: int = limited(10, 0, 10_000)
    """Attack steps for boundary examples; of other allocations the most."""
    robust: int = limited(2, 0, 10_000)
    """Attack steps for robust examples; of gaussian and history the fewest."""
    outlier: int = limited(0, 0, 10_000)
    """Attack steps for outliers, also of gaussian."""
    allocation: Literal["categories", "gaussian", "history", "early-stop", "radius", "second-step"] = "categories"
    """What decides on steps: the class; a bell curve over the score; the last margin; whether the attack has succeeded;
    radius: all get the same, in balls by the last margin; second-step: one, and more by the first step's gradient."""
    allocation_value: float | None = limited(None, TINY, 1e30)
    """gaussian: its width (0.5 of the largest score); early-stop: steps from success on (1); radius: the smallest (0.5
    of eps); second-step: how many take more than one (0.25); null: these."""
    shuffled: bool = False
    """Control of an allocation: what it gives is dealt out to the examples by chance."""
    ordered: bool = True
    """Refuse step counts that the method does not want; studies say false."""
    step_size: float | None = None
    """Step size of boundary examples; null: 0.007 at eps 0.031, else 2.25·eps/boundary. Other allocations: null."""
    scale: float | None = None
    """Step size of boundary examples as scale·eps/boundary instead; null: step_size says it."""
    clean_warmup: float = limited(0.0, 0, 1)
    """Share of the run's steps before the first attack: until then everyone is trained on as it is."""
    eps_warmup: float = limited(0.0, 0, 1)
    """Share of the run's steps over which eps, and the step sizes with it, then grow to what they are; 0: at once."""
    gamma: float = 0.8
    """γ in (0, 1]: how far the estimate F_R of the robust share is trusted; smaller attacks more examples."""
    momentum: float = 0.9
    """Momentum of the moving average F_R."""
    selection: Literal["eval", "train", "last"] | None = None
    """Mode of the network whose clean logits select; last: those of the last visit. null: the objective's own."""
    score: Literal["svar", "cross-entropy", "margin", "gradient-norm", "random"] = "svar"
    """What examples are told apart by; svar, the signed prediction variance, is the paper's."""
    separation: Literal["quantile", "oracle"] = "quantile"
    """How the score separates examples; oracle: the true classes by ten PGD steps, for studies."""
    start: Literal["uniform", "normal", "clipped", "zero"] | None = None
    """Where the attack starts; clipped: uniform, then clipped to valid pixels. null: the objective's own."""
    start_radius: float = limited(1.0, TINY, 1e30)
    """Radius of a uniform start, in units of eps."""
    project: bool = True
    """Whether attacked images are brought back into the ball; false: into valid pixels only."""
    first_layer: int = limited(0, 0, 10_000)
    """YOPO: moves through the first layer alone after each step, that is each full pass; 0: none, plain steps."""
    align: float = limited(0.0, 0, 1e30)
    """GradAlign: weight of the term that aligns gradients; 0: none."""
    carry: bool = False
    """Free: the perturbation is carried over and moved by the updates' own backward; training.replays goes with it."""
    jsd: bool = True
    """AugMix: whether views are held together by the JSD; false: cross-entropy on one view of every example."""
    severity: float = 3.0
    """AugMix: strengths of the operations go up to this, of 10."""
    width: int = limited(3, 1, 100)
    """AugMix: chains of operations in a view."""
    depth: int = limited(-1, -1, 100)
    """AugMix: operations in a chain; -1: 1 to 3 at random."""
    all_ops: bool = False
    """AugMix: also colour, contrast, brightness and sharpness, which test corruptions share."""

    @property
    def threat(self) -> Threat | None:
        """What is trained against; None for AugMix, which has no attack."""
        return None if self.objective == "augmix" else Threat(cast(Literal["linf", "l2"], self.norm), self.eps)

    def budget(self) -> StepBudget:
        """Steps for each class."""
        steps = (self.boundary, self.robust, self.outlier)
        ordered = self.ordered and self.allocation == "categories"  # others know no classes
        return StepBudget(*steps, ordered=ordered, step_size=self.step_size, scale=self.scale)

    @property
    def remembers(self) -> bool:
        """Whether steps look at what is remembered of the examples."""
        return self.selection == "last" or self.allocation in ("history", "radius")

    def allocator(self) -> Allocation:
        """What deals out the steps.

        Raises:
            ConfigError: a setting would have no effect on it.
        """
        found: Allocation = self.budget()
        if self.allocation != "categories":
            for key in ("step_size", "scale"):
                if getattr(self, key) is not None:
                    raise ConfigError(f"method.{key} is of allocation=categories alone: --set {key}=null")
            found = ALLOCATIONS[self.allocation](self)
        if self.allocation_value is not None and self.allocation in ("categories", "history"):
            raise ConfigError(f"method.allocation_value is nothing of {self.allocation}: --set allocation_value=null")
        return ShuffledBudget(found, self.eps) if self.shuffled else found

    def falls_short(self) -> str | None:
        """What to say where all the steps of a boundary example do not take it across the ball; None where they do."""
        budget = self.budget()
        step, moves = budget.boundary_step(self.eps), budget.boundary * max(self.first_layer, 1)
        other = self.objective == "augmix" or self.allocation != "categories"
        if other or not moves or moves * step > 0.999 * self.eps:
            return None
        return (
            f"{moves} steps of {step:g} move an example by {moves * step:g} at most, less than eps {self.eps:g}: "
            "--set scale=1.7 makes each 1.7·eps over their number"
        )

    @property
    def kind(self) -> str:
        """What is built: the objective or, on pgd-at, one of the two baselines that are settings of it."""
        return "free" if self.carry else "grad-align" if self.align else self.objective

    def build_objective(self) -> bt.Objective:
        """The objective with its settings.

        Raises:
            ConfigError: a setting would have no effect on it.
        """
        if self.kind in ("free", "grad-align") and self.objective != "pgd-at":
            setting = "carry" if self.carry else "align"
            raise ConfigError(f"method.{setting} goes with pgd-at, not with {self.objective}: --set objective=pgd-at")
        for key in sorted(set().union(*SETTINGS.values()) - SETTINGS[self.kind]):
            value, default = as_setting(getattr(self, key)), as_setting(getattr(MethodConfig, key))
            if value != default:
                raise ConfigError(f"method.{key} is {value}, but {self.kind} takes none: --set {key}={default}")
        if self.eps_warmup and self.step_size is not None:
            raise ConfigError("method.eps_warmup lets step sizes grow with eps; give method.scale, not step_size")
        own = {key: value for key in ("beta", "selection") if (value := getattr(self, key)) is not None}
        if self.kind == "augmix":
            self._check_jsd()
            return bt.AugMix(views=self.view_maker(), jsd=self.jsd, **own)
        if self.kind == "free":
            return Free(eps=self.eps, norm=self.norm)
        if self.kind == "grad-align":
            return GradAlign(weight=self.align, eps=self.eps, norm=self.norm)
        if self.kind in GUIDED:
            return GUIDED[self.kind](eps=self.eps, norm=self.norm, beta=self.beta)
        attack = Attack(start=self.start, radius=self.start_radius, project=self.project)
        if self.first_layer:
            attack = dataclasses.replace(attack, ascent=FirstLayer(self.first_layer))
        return ADVERSARIAL[self.kind](eps=self.eps, norm=self.norm, attack=attack, **own)

    def _check_jsd(self) -> None:
        if not self.jsd and self.budget().uniform_steps is None:
            same = f"--set robust={self.boundary} --set outlier={self.boundary}"
            raise ConfigError(
                f"method.jsd is false, which is one view of every example: nothing is mined, so add {same}"
            )
        if not self.jsd and self.selection is not None:
            raise ConfigError("method.selection is set, but without the JSD nothing is selected: --set selection=null")

    def view_maker(self) -> ViewMaker:
        """What AugMix views are made of."""
        return ViewMaker(self.severity, self.width, self.depth, self.all_ops)

    def build(self, examples: int = 1) -> bt.BulletTrain:
        """The training step, for so many examples, which are remembered where that is asked for."""
        oracle = bt.OracleSeparation(eps=self.eps, norm=self.norm) if self.separation == "oracle" else None
        return bt.BulletTrain(
            self.build_objective(),
            budget=self.allocator(),
            gamma=self.gamma,
            momentum=self.momentum,
            score=SCORES[self.score],
            separation=oracle or bt.separate,
            examples=examples if self.remembers else 0,
        )


def _value(method: MethodConfig, usual: float) -> float:
    return usual if method.allocation_value is None else method.allocation_value


def _whole(method: MethodConfig, usual: int) -> int:
    value = _value(method, usual)
    if value != int(value):
        raise ConfigError(f"method.allocation_value is {value:g}; of {method.allocation} it has to be a whole number")
    return int(value)


ALLOCATIONS: dict[str, Callable[[MethodConfig], Allocation]] = {
    "gaussian": lambda m: bt.GaussianBudget(m.boundary, width=_value(m, 0.5), least=m.robust, outlier=m.outlier),
    "history": lambda m: bt.HistoryBudget(m.boundary, least=m.robust),
    "early-stop": lambda m: bt.EarlyStopBudget(m.boundary, further=_whole(m, 1)),
    "radius": lambda m: bt.RadiusBudget(m.boundary, eps=m.eps, low=_value(m, 0.5)),
    "second-step": lambda m: bt.SecondStepBudget(m.boundary, share=_value(m, 0.25)),
}
OWN_ATTACK = frozenset(("beta", "allocation", "eps_warmup"))
ATTACK = OWN_ATTACK - {"beta"} | {"start", "start_radius", "project", "first_layer", "selection", "clean_warmup"}
SETTINGS: dict[str, frozenset[str]] = {
    "pgd-at": ATTACK,
    "trades": ATTACK | {"beta"},
    "mart": ATTACK | {"beta"},
    "gat": OWN_ATTACK,
    "nuat": OWN_ATTACK,
    "fgsm-pgi": OWN_ATTACK - {"eps_warmup"},
    "augmix": frozenset(("beta", "selection", "jsd", "severity", "width", "depth", "all_ops")),
    "free": frozenset(("carry",)),
    "grad-align": frozenset(("align", "eps_warmup")),
}
"""The settings that some objectives have and others do not."""
