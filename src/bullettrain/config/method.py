"""What is trained for, and how the effort is spent: the section ``method`` of a config, as an engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, cast

import bullettrain as bt
from bullettrain.allocation import StepBudget
from bullettrain.attacks import Attack
from bullettrain.augmix import ViewMaker
from bullettrain.baselines import FirstLayer, Free, GradAlign
from bullettrain.config.settings import ConfigError, as_setting

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

    objective: Literal["pgd-at", "trades", "mart", "augmix"] = "trades"
    """The loss that is minimised, and the attack that goes with it."""
    eps: float = 0.031
    """Radius of the perturbations that are trained against, for pixels in [0, 1]; 8/255 is a number too."""
    norm: str = "linf"
    """Norm of the radius: linf or l2."""
    beta: float | None = None
    """Weight of the robust term; null: the objective's own."""
    boundary: int = 10
    """Attack steps for boundary examples."""
    robust: int = 2
    """Attack steps for robust examples."""
    outlier: int = 0
    """Attack steps for outliers."""
    ordered: bool = True
    """Refuse step counts that the method does not want; studies say false."""
    step_size: float | None = None
    """Step size of boundary examples; null: 0.007 at eps 0.031, else 2.25·eps/boundary."""
    scale: float | None = None
    """Step size of boundary examples as scale·eps/boundary instead; null: step_size says it."""
    clean: float = 0.0
    """Share of the steps before the first attack: until then everyone is trained on as it is."""
    ramp: float = 0.0
    """Share of the steps over which eps, and the step sizes with it, then grow to what they are; 0: at once."""
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
    start_radius: float = 1.0
    """Radius of a uniform start, in units of eps."""
    project: bool = True
    """Whether attacked images are brought back into the ball; false: into valid pixels only."""
    first_layer: int = 0
    """YOPO: moves through the first layer alone after each step, that is each full pass; 0: none, plain steps."""
    align: float = 0.0
    """GradAlign: weight of the term that aligns gradients; 0: none."""
    carry: bool = False
    """Free: the perturbation is carried over and moved by the updates' own backward; training.replays goes with it."""
    jsd: bool = True
    """AugMix: whether views are held together by the JSD; false: cross-entropy on one view of every example."""
    severity: float = 3.0
    """AugMix: strengths of the operations go up to this, of 10."""
    width: int = 3
    """AugMix: chains of operations in a view."""
    depth: int = -1
    """AugMix: operations in a chain; -1: 1 to 3 at random."""
    all_ops: bool = False
    """AugMix: also colour, contrast, brightness and sharpness, which test corruptions share."""

    @property
    def threat(self) -> Threat | None:
        """What is trained against; None for AugMix, which has no attack."""
        return None if self.objective == "augmix" else Threat(cast(Literal["linf", "l2"], self.norm), self.eps)

    def budget(self) -> StepBudget:
        """Steps for each class."""
        return StepBudget(
            self.boundary,
            self.robust,
            self.outlier,
            ordered=self.ordered,
            step_size=self.step_size,
            scale=self.scale,
        )

    def falls_short(self) -> str | None:
        """What to say where all the steps of a boundary example do not take it across the ball; None where they do."""
        budget = self.budget()
        step, moves = budget.boundary_step(self.eps), budget.boundary * max(self.first_layer, 1)
        if self.objective == "augmix" or not moves or moves * step > 0.999 * self.eps:
            return None
        return (
            f"{moves} steps of {step:g} move an example by {moves * step:g} at most, less than eps {self.eps:g}: "
            "--set scale=1.7 makes each 1.7·eps over their number"
        )

    def make_objective(self) -> bt.Objective:
        """The objective with its settings."""
        if self.ramp and self.step_size is not None:
            raise ConfigError("method.ramp lets step sizes grow with eps; give method.scale in the place of step_size")
        if self.objective == "augmix":
            return self._make_augmix()
        self._refuse(("jsd", "severity", "width", "depth", "all_ops"), f"{self.objective} makes no AugMix views")
        if self.objective == "pgd-at":
            self._refuse(("beta",), "pgd-at has no beta")
            return self._make_pgd_at()
        self._refuse(("align", "carry"), f"that goes with pgd-at, not with {self.objective}")
        kind = bt.TRADES if self.objective == "trades" else bt.MART
        beta = 6.0 if self.beta is None else self.beta
        return kind(eps=self.eps, norm=self.norm, beta=beta, attack=self._attack(), selection=self.selection)

    def _make_pgd_at(self) -> bt.Objective:
        attack = ("start", "start_radius", "project", "first_layer", "selection", "clean")
        if self.carry:
            self._refuse((*attack, "align", "ramp"), "method.carry (Free) has no attack of its own")
            if self.budget().uniform_steps != 1:
                raise ConfigError("method.carry (Free) is one step for everyone; set boundary=1, robust=1, outlier=1")
            return Free(eps=self.eps, norm=self.norm)
        if self.align:
            self._refuse(attack, "method.align (GradAlign) attacks from x itself, everyone alike")
            if not self.budget().uniform_steps:
                raise ConfigError("method.align (GradAlign) wants the same steps for everyone, e.g. one each")
            return GradAlign(weight=self.align, eps=self.eps, norm=self.norm)
        return bt.PGDAT(eps=self.eps, norm=self.norm, attack=self._attack(), selection=self.selection)

    def _make_augmix(self) -> bt.AugMix:
        attack = ("start", "start_radius", "project", "first_layer", "align", "carry", "clean", "ramp")
        self._refuse(attack, "AugMix has no attack")
        for key in ("boundary", "robust", "outlier"):
            if getattr(self, key) > 1:
                raise ConfigError(f"method.{key} is {getattr(self, key)}; AugMix's step is both views, so 1 or 0")
        if not self.jsd and self.budget().uniform_steps is None:
            raise ConfigError(
                "method.jsd is false, which is one view of every example: nothing is mined, "
                f"so add --set robust={self.boundary} --set outlier={self.boundary}"
            )
        if not self.jsd:
            self._refuse(("selection",), "without the JSD nothing is selected")
        beta = 12.0 if self.beta is None else self.beta
        return bt.AugMix(views=self.view_maker(), beta=beta, jsd=self.jsd, selection=self.selection or "train")

    def _refuse(self, keys: tuple[str, ...], why: str) -> None:
        """Settings that would have no effect are mistakes."""
        for key in keys:
            value, default = as_setting(getattr(self, key)), as_setting(getattr(MethodConfig, key))
            if value != default:
                raise ConfigError(f"method.{key} is {value}, but {why}; it has to be {default}: --set {key}={default}")

    def _attack(self) -> Attack:
        plain = Attack(start=self.start, radius=self.start_radius, project=self.project)
        return dataclasses.replace(plain, ascent=FirstLayer(self.first_layer)) if self.first_layer else plain

    def view_maker(self) -> ViewMaker:
        """What AugMix views are made of."""
        return ViewMaker(self.severity, self.width, self.depth, self.all_ops)

    def engine(self, examples: int = 1) -> bt.BulletTrain:
        """The training step, for so many examples, which are remembered where that is asked for."""
        oracle = bt.OracleSeparation(eps=self.eps, norm=self.norm) if self.separation == "oracle" else None
        return bt.BulletTrain(
            self.make_objective(),
            budget=self.budget(),
            gamma=self.gamma,
            momentum=self.momentum,
            score=SCORES[self.score],
            separation=oracle or bt.separate,
            examples=examples if self.selection == "last" else 0,
        )
