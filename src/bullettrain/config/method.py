"""The section ``method`` of a config, and the training step that it builds."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import bullettrain as bt
from bullettrain.allocation import Allocation, ShuffledBudget, StepBudget
from bullettrain.attacks import Attack
from bullettrain.augmix import ViewMaker
from bullettrain.baselines import FGSMPGI, GAT, FirstLayer, Free, GradAlign, NuAT
from bullettrain.config.settings import TINY, ConfigError, as_setting, limited
from bullettrain.history import LeaveOut, LeftOutBy
from bullettrain.objectives import AdversarialObjective, Objective
from bullettrain.validation import check_known

ONE_STEP: dict[str, type[Objective]] = {
    "grad-align": GradAlign,
    "gat": GAT,
    "nuat": NuAT,
    "fgsm-pgi": FGSMPGI,
    "free": Free,
}
"""Baselines that are objectives with one step for all examples, by name: `--method NAME` takes them, too."""
OBJECTIVES: dict[str, type[Objective]] = {
    "pgd-at": bt.PGDAT,
    "trades": bt.TRADES,
    "mart": bt.MART,
    "augmix": bt.AugMix,
    **ONE_STEP,
}
"""Objectives by name. A new one needs its file and its line here."""
SCORES = {
    "svar": bt.signed_prediction_variance,
    "cross-entropy": bt.signed_cross_entropy,
    "margin": bt.signed_margin,
    "gradient-norm": bt.signed_gradient_norm,
    "random": bt.random_score,
}
ALLOCATIONS: dict[str, Callable[[MethodConfig], Allocation]] = {
    "gaussian": lambda m: bt.GaussianBudget(m.boundary, width=_value(m, 0.5), min_steps=m.robust, outlier=m.outlier),
    "history": lambda m: bt.HistoryBudget(m.boundary, min_steps=m.robust),
    "early-stop": lambda m: bt.EarlyStopBudget(m.boundary, extra_steps=_whole(m, 1)),
    "radius": lambda m: bt.RadiusBudget(m.boundary, eps=m.eps, min_radius=_value(m, 0.5)),
    "second-step": lambda m: bt.SecondStepBudget(m.boundary, share=_value(m, 0.25)),
}
"""Allocations other than the paper's categories, by name, from the settings."""
if TYPE_CHECKING:
    ObjectiveName = str
    ScoreName = str
    AllocationName = str
else:  # the names in these tables are the valid values
    ObjectiveName = Literal[tuple(OBJECTIVES)]
    ScoreName = Literal[tuple(SCORES)]
    AllocationName = Literal[("categories", *ALLOCATIONS)]


@dataclass(frozen=True)
class Threat:
    """The threat model: perturbations of at most ``eps`` in ``norm``."""

    norm: Literal["linf", "l2"]
    eps: float


@dataclass(frozen=True)
class MethodConfig:
    """The objective, the attack and the allocation of attack steps."""

    objective: ObjectiveName = "trades"
    """Training objective, with its loss and attack."""
    eps: float = 0.031
    """Radius of the perturbations to train against, for pixels in [0, 1]; a fraction such as 8/255 is allowed."""
    norm: Literal["linf", "l2"] = "linf"
    """Norm of the perturbations."""
    beta: float | None = None
    """Weight of the robust term of the loss; null for the default of the objective: trades and mart 6, augmix 12, gat
    and fgsm-pgi 10, nuat 4.5, grad-align 0.2; pgd-at and free have none."""
    label_smoothing: float = limited(0.0, 0, 0.99)
    """Label smoothing of the cross-entropy of the loss; the attack has none. Only with pgd-at, trades and mart."""
    boundary: int = limited(10, 0, 10_000)
    """Attack steps for boundary examples; for other allocations, the most steps."""
    robust: int = limited(2, 0, 10_000)
    """Attack steps for robust examples, with categories each of 1.7·eps/robust; for gaussian and history, the fewest
    steps."""
    outlier: int = limited(0, 0, 10_000)
    """Attack steps for outliers, with categories and gaussian; with categories each of 1.7·eps/outlier."""
    allocation: AllocationName = "categories"
    """How attack steps are allocated: by category (the paper), by a Gaussian over the score, by the margin after the
    last attack (history), until the attack succeeds (early-stop), equally but with a smaller eps after a large negative
    margin (radius), or one step and more for large first gradients (second-step)."""
    allocation_value: float | None = limited(None, TINY, 1e30)
    """Parameter of the allocation: width of gaussian (0.5), steps after success of early-stop (1), smallest share of
    eps of radius (0.5), share of examples with more steps of second-step (0.25); null for these defaults."""
    shuffled: bool = False
    """Whether to shuffle the allocated steps among the examples of a batch, as a control experiment."""
    leave_out: float = limited(0.0, 0, 0.99)
    """InfoBatch: share of the examples with a last margin above the mean that an epoch leaves out, at random, while the
    others among them count more in the loss; 0 for none. Whole groups of batches are left out, and none in the last
    eighth of the epochs."""
    leave_out_by: LeftOutBy = "margin"
    """Which examples may be left out: those with a margin above the mean, or, as a control experiment, as many of all
    (chance)."""
    ordered: bool = True
    """Whether to require boundary ≥ robust ≥ outlier steps; false is for studies."""
    step_size: float | None = None
    """Attack step size for boundary examples, and for all if all have the same number of steps; null for 0.007 at eps
    0.031, else 2.25·eps/boundary. Only with categories."""
    scale: float | None = None
    """Set the step size to scale·eps/boundary instead; null to use step_size."""
    clean_warmup: float = limited(0.0, 0, 1)
    """Share of the training steps at the start without attacks."""
    eps_warmup: float = limited(0.0, 0, 1)
    """Share of the training steps, after clean_warmup, in which eps and the step sizes grow from 0; 0 for none."""
    gamma: float = 0.8
    """γ in (0, 1]: factor on F_R, the estimated share of robust examples; smaller values attack more examples."""
    momentum: float = 0.9
    """Momentum of the moving average F_R."""
    selection: Literal["eval", "train", "last"] | None = None
    """Clean logits that select examples: of the network in eval mode, in train mode, or of the last visit to the
    example; null for the default of the objective."""
    score: ScoreName = "svar"
    """Score that selects examples; svar, the signed prediction variance, is the paper's."""
    separation: Literal["quantile", "oracle"] = "quantile"
    """How examples are put into categories: by a quantile of the score (the paper), or by an oracle of ten PGD steps,
    for studies."""
    start: Literal["uniform", "normal", "clipped", "zero"] | None = None
    """Initial perturbation of the attack: uniform, normal, clipped (uniform, then clipped to valid pixels) or zero;
    null for the default of the objective."""
    start_radius: float = limited(1.0, TINY, 1e30)
    """Radius of a uniform initial perturbation, as a multiple of eps."""
    project: bool = True
    """Whether each attack step projects back into the eps ball; false only clips to valid pixels."""
    stop_at_success: bool = False
    """Whether the attack on an example stops at the first point that is misclassified; further steps cost as much, but
    do not move it."""
    first_layer: int = limited(0, 0, 10_000)
    """YOPO: number of updates through the first layer after each full step; 0 for plain attack steps."""
    jsd: bool = True
    """AugMix: whether to use the Jensen-Shannon loss; false trains with cross-entropy on one view of each example."""
    severity: float = 3.0
    """AugMix: maximum strength of the operations, out of 10."""
    width: int = limited(3, 1, 100)
    """AugMix: number of operation chains in each view."""
    depth: int = limited(-1, -1, 100)
    """AugMix: number of operations in each chain; -1 for 1 to 3 at random."""
    all_ops: bool = False
    """AugMix: whether to add the color, contrast, brightness and sharpness operations, which overlap with test
    corruptions."""

    @property
    def threat(self) -> Threat | None:
        """The threat model, or None for AugMix, which has no attack."""
        return Threat(self.norm, self.eps) if issubclass(self.kind, AdversarialObjective) else None

    @property
    def attacks(self) -> bool:
        """Whether any example is attacked in training."""
        return self.threat is not None and self.budget().uniform_steps != 0 and self.clean_warmup < 1

    def budget(self) -> StepBudget:
        """Return the steps of each category."""
        steps = (self.boundary, self.robust, self.outlier)
        ordered = self.ordered and self.allocation == "categories"  # others have no categories
        return StepBudget(*steps, ordered=ordered, step_size=self.step_size, scale=self.scale)

    @property
    def remembers(self) -> bool:
        """Whether the step itself uses the history of the examples."""
        return self.selection == "last" or self.allocation in ("history", "radius")

    def leaves_out(self, epochs: int, multiple: int, seed: int) -> LeaveOut | None:
        """Return what leaves examples out of epochs; None: no epoch leaves any out."""
        if not self.leave_out:
            return None
        return LeaveOut(self.leave_out, epochs=epochs, by=self.leave_out_by, multiple=multiple, seed=seed)

    def allocator(self) -> Allocation:
        """Return the scheme that allocates attack steps.

        Raises:
            ConfigError: a setting has no effect with this allocation.
        """
        allocation: Allocation = self.budget()
        if self.allocation != "categories":
            for key in ("step_size", "scale"):
                if getattr(self, key) is not None:
                    raise ConfigError(f"method.{key} needs allocation=categories: --set {key}=null")
            allocation = ALLOCATIONS[self.allocation](self)
        if self.allocation_value is not None and self.allocation in ("categories", "history"):
            raise ConfigError(f"{self.allocation} takes no method.allocation_value: --set allocation_value=null")
        return ShuffledBudget(allocation, self.eps) if self.shuffled else allocation

    def shortfall(self) -> str | None:
        """Return a warning if all steps together are shorter than eps, else None."""
        if self.threat is None or self.allocation != "categories":
            return None
        return self.budget().shortfall(self.eps, max(self.first_layer, 1), "--set method.")

    @property
    def kind(self) -> type[Objective]:
        """The class of the objective."""
        return OBJECTIVES[check_known(self.objective, OBJECTIVES, "method.objective is", error=ConfigError)]

    def build_objective(self) -> Objective:
        """Build the objective.

        Raises:
            ConfigError: a setting has no effect with this objective.
        """
        for key, value in untaken(self.kind).items():
            if getattr(self, key) != value:
                own, usual = as_setting(getattr(self, key)), as_setting(value)
                raise ConfigError(f"method.{key} is {own}, but {self.objective} takes none: --set {key}={usual}")
        if self.leave_out_by != "margin" and not self.leave_out:
            raise ConfigError("method.leave_out_by is set, but nothing is left out: --set leave_out=0.5")
        if self.eps_warmup and self.step_size is not None:
            raise ConfigError("method.eps_warmup lets step sizes grow with eps; give method.scale, not step_size")
        self._check_jsd()
        arguments: dict[str, Any] = {option: getattr(self, option) for option in OPTIONS}
        attack = Attack(self.start, self.start_radius, self.project, stop_at_success=self.stop_at_success)
        if self.first_layer:
            attack = dataclasses.replace(attack, ascent=FirstLayer(self.first_layer))
        arguments |= {"attack": attack, "views": self.view_maker()}
        taken = {key: value for key, value in arguments.items() if value is not None and self.kind.takes(key)}
        if issubclass(self.kind, AdversarialObjective):
            taken |= {"eps": self.eps, "norm": self.norm}
        return self.kind(**taken)

    def _check_jsd(self) -> None:
        if not self.jsd and self.budget().uniform_steps is None:
            same = f"--set robust={self.boundary} --set outlier={self.boundary}"
            raise ConfigError(f"method.jsd is false, one view of every example: nothing is mined, so add {same}")
        if not self.jsd and self.selection is not None:
            raise ConfigError("method.selection is set, but without the JSD nothing is selected: --set selection=null")

    def view_maker(self) -> ViewMaker:
        """Build the maker of AugMix views."""
        return ViewMaker(self.severity, self.width, self.depth, self.all_ops)

    def build(self, dataset_size: int = 1) -> bt.BulletTrain:
        """Build the training step. ``dataset_size`` is that of the training set, for methods that use the history."""
        oracle = bt.OracleSeparation(eps=self.eps, norm=self.norm) if self.separation == "oracle" else None
        objective, allocator = self.build_objective(), self.allocator()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shortfall() says it with the command's options
            return bt.BulletTrain(
                objective,
                budget=allocator,
                gamma=self.gamma,
                momentum=self.momentum,
                score=SCORES[self.score],
                separation=oracle or bt.separate,
                dataset_size=dataset_size if self.remembers or self.leave_out else 0,
            )


def _value(method: MethodConfig, usual: float) -> float:
    return usual if method.allocation_value is None else method.allocation_value


def _whole(method: MethodConfig, usual: int) -> int:
    value = _value(method, usual)
    if value != int(value):
        raise ConfigError(f"method.allocation_value is {value:g}; of {method.allocation} it has to be a whole number")
    return int(value)


OPTIONS = ("beta", "selection", "label_smoothing", "jsd")
"""Settings that are options of some objectives, under the same name."""
PARTS = {
    "attack": ("start", "start_radius", "project", "first_layer", "stop_at_success", "clean_warmup"),
    "views": ("severity", "width", "depth", "all_ops"),
}
"""Settings that belong to an option of some objectives."""


def untaken(kind: type[Objective]) -> dict[str, Any]:
    """Return the settings that have no effect with a class of objectives, with their defaults."""
    keys = [key for key in OPTIONS if not kind.takes(key)]
    keys += [key for option, parts in PARTS.items() if not kind.takes(option) for key in parts]
    attacks = issubclass(kind, AdversarialObjective)
    keys += [] if attacks and not kind.one_by_one else ["allocation"]
    keys += ["leave_out"] if kind.one_by_one else []
    keys += [] if attacks and not kind.carries_perturbations else ["eps_warmup"]
    return {field.name: field.default for field in dataclasses.fields(MethodConfig) if field.name in keys}
