"""What a step is made of: refused where it cannot be, and brought back from a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from bullettrain.allocation import Allocation
from bullettrain.checks import shown
from bullettrain.history import History
from bullettrain.mining import RobustFraction, SeparationWithModel
from bullettrain.objectives import Objective


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


def restore_history(history: History, state: Mapping[str, Any], *, needed: bool) -> None:
    """The history from ``state``; empty, with a warning where it is ``needed``, if there is none."""
    if "history" in state:
        history.load_state_dict(state["history"])
        return
    for tensor in history.tensors():
        tensor.zero_()
    if needed:
        warnings.warn(
            "the state has no last scores: until they are trained on again all are on the boundary", stacklevel=3
        )


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
