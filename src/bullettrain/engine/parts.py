"""What a step is made of: refused where it cannot be, or cannot be captured, and brought back from a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from bullettrain.allocation import Allocation, StepBudget
from bullettrain.augmix import ViewMaker
from bullettrain.checks import shown
from bullettrain.mining import LastScores, RobustFraction, SeparationWithModel
from bullettrain.objectives import MART, PGDAT, TRADES, AdversarialObjective, AugMix, Objective

if TYPE_CHECKING:
    from bullettrain.engine.step import BulletTrain


def check_parts(objective: object, budget: object, score: object, separation: object) -> None:
    """TypeError, with what to give instead, where one of them is no such thing."""
    if not isinstance(objective, Objective):
        name = getattr(objective, "__name__", type(objective).__name__)
        raise TypeError(f"the objective is {name}; give an instance, e.g. TRADES()")
    if not hasattr(objective, "selection"):
        raise TypeError(f"{type(objective).__name__} was not set up; call super().__init__() in its __init__")
    if isinstance(budget, type) or not hasattr(budget, "allocate"):
        raise TypeError(f"the budget is {shown(budget)}; give StepBudget(boundary, robust) or StepBudget.uniform(n)")
    if missing := [name for name in ("uniform_steps", "step_sizes") if not hasattr(budget, name)]:
        raise TypeError(f"the budget has no {missing[0]}; bullettrain.allocation.Allocation says what one has")
    for name, function in (("score", score), ("separation", separation)):
        if isinstance(function, type):
            raise TypeError(f"the {name} is {function.__name__}; give an instance, e.g. {function.__name__}()")
        if not (callable(function) or isinstance(function, SeparationWithModel)):
            raise TypeError(f"the {name} is {shown(function)}; give a function")


def check_last(objective: Objective, budget: Allocation, separation: object, examples: int) -> None:
    """ValueError where examples are to be selected by their last logits, and that cannot be."""
    if objective.selection != "last" or budget.uniform_steps is not None:
        return
    name = type(objective).__name__
    if not objective.has_clean_term:
        raise ValueError(f"selection is 'last', but the loss of {name} has no clean logits; give selection='eval'")
    if isinstance(separation, SeparationWithModel):
        raise ValueError("selection is 'last', but the separation looks at what logits are now; give 'eval' or 'train'")
    if not examples:
        raise ValueError("selection is 'last'; give examples=, how many there are, and every step index=, which it has")


def restore_generators(generators: Mapping[str, torch.Generator], states: Mapping[str, Any]) -> None:
    """Set sources of noise, by whose they are, to ``states``; warn of one that is not there any more."""
    for name, kept in states.items():
        if name not in generators:
            warnings.warn(
                f"the state holds a generator of the {name}, which has none here: noise differs", stacklevel=3
            )
            continue
        try:
            generators[name].set_state(kept.cpu())
        except RuntimeError:  # that of a GPU has another size
            device = generators[name].device
            raise ValueError(f"the {name}'s generator is on {device}, that of the state was elsewhere") from None


def restore_scores(last: LastScores, state: Mapping[str, Any]) -> None:
    """The last scores from ``state``; warn where it has none."""
    if "scores" in state:
        last.load_state_dict(state)
        return
    last.live.zero_()
    warnings.warn("the state has no last scores: until they are trained on again all are on the boundary", stacklevel=3)


def restore_fraction(fraction: RobustFraction, state: Mapping[str, Any]) -> None:
    """F_R, γ and momentum from ``state``; warn where the last two were others here."""
    own = fraction.state_dict()
    fraction.load_state_dict(state)
    kept = fraction.state_dict()
    if other := [name for name in ("gamma", "momentum") if kept[name] != own[name]]:
        theirs, given = (", ".join(f"{name}={values[name]:g}" for name in other) for values in (kept, own))
        warnings.warn(
            f"the state was made with {theirs}, which is used from here on, not {given}; to change it, set "
            f"robust_fraction.{other[0]} after loading",
            stacklevel=3,
        )


def why_not_replayed(train: BulletTrain) -> str | None:
    """Why selecting cannot be captured, if so: a score or separation of one's own may do more than tensor operations.

    One that does not says so by an attribute, ``captured = True``.
    """
    if train.budget.uniform_steps is not None:
        return None
    for name, part in (("score", train.score), ("separation", train.separation)):
        home = getattr(part, "__module__", None) or type(part).__module__
        if not home.startswith("bullettrain.") and not getattr(part, "captured", False):
            return f"its {name} is not of this library, and does not say `captured = True`"
    return None


def why_not_whole(train: BulletTrain) -> str | None:
    """Why a step cannot be captured as it is, if so: what Python does in it is done once, and then never again."""
    objective = train.objective
    if type(train.budget) is not StepBudget or train.budget.uniform_steps is None or isinstance(objective, AugMix):
        return why_not_grouped(train)
    for part in (objective, objective.attack.climb if isinstance(objective, AdversarialObjective) else objective):
        if not type(part).__module__.startswith("bullettrain."):
            return f"{type(part).__name__} may do something in Python at every step"
    return None


def why_not_grouped(train: BulletTrain) -> str | None:
    """Why the group engine cannot take this engine's steps, if so: rows take turns, and N_B has to be the most."""
    objective, budget = train.objective, train.budget
    if isinstance(objective, AugMix):
        if not isinstance(objective.views, ViewMaker):
            return "its views are made by a function of its own"
        if isinstance(budget, StepBudget) and budget.boundary > 1:
            return "AugMix has one step"
    elif not isinstance(objective, AdversarialObjective):
        return "its objective is no attack"
    elif objective.not_grouped:
        return objective.not_grouped
    elif objective.attack_mode != "eval":
        return "its attack runs in training mode"
    if type(objective) not in (PGDAT, TRADES, MART, AugMix):
        return f"{type(objective).__name__} may corrupt in a way of its own"
    if type(budget) is not StepBudget or not budget.boundary >= budget.robust >= budget.outlier:
        return "its step counts are not in the order boundary ≥ robust ≥ outlier"
    if isinstance(train.separation, SeparationWithModel):
        return "its separation looks at the network"
    without = not objective.has_clean_term and (objective.selection == "train" or isinstance(objective, AugMix))
    if without and budget.uniform_steps is None:
        return "it selects by training-mode logits that its loss does not have"
    return None
