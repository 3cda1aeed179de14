"""FAST and N-FGSM: settings of the attack, and nothing else."""

from __future__ import annotations

from bullettrain.allocation import StepBudget
from bullettrain.attacks import Attack
from bullettrain.objectives import AdversarialObjective
from bullettrain.step import BulletTrain

FAST = Attack(start="clipped")
"""Wong et al.: from a uniform point of the ball, clipped to valid pixels."""

N_FGSM = Attack(start="clipped", radius=2.0, project=False)
"""De Jorge et al.: from uniform noise twice as wide as the ball, and never back into it."""


def fast_budget(steps: int = 1) -> StepBudget:
    """One step of 1.25·ε; more steps of 1.7·ε/N each."""
    return StepBudget.uniform(steps, scale=1.25 if steps == 1 else 1.7)


def n_fgsm_budget() -> StepBudget:
    """One step of ε."""
    return StepBudget.uniform(1, scale=1.0)


def fast(objective: AdversarialObjective, *, steps: int = 1) -> BulletTrain:
    """FAST: the objective with one large FGSM step for everyone, or with a few (multi-step FAST).

    Args:
        objective: PGDAT, TRADES or MART with its settings.
        steps: N; the paper compares with 1 to 5.
    """
    return BulletTrain(attacked(objective, FAST), budget=fast_budget(steps))


def n_fgsm(objective: AdversarialObjective) -> BulletTrain:
    """N-FGSM: noise of ±2ε, one step of ε from there, no projection; its authors have it on PGDAT."""
    return BulletTrain(attacked(objective, N_FGSM), budget=n_fgsm_budget())


def attacked(objective: AdversarialObjective, attack: Attack) -> AdversarialObjective:
    """The same objective with another attack, unless its corruption is its own."""
    own = getattr(type(objective), "corrupt", None)
    if own is not AdversarialObjective.corrupt or objective.whole_step:
        name = getattr(objective, "__name__", type(objective).__name__)
        raise TypeError(f"the objective is {name}; give PGDAT, TRADES or MART, e.g. TRADES(eps=8/255)")
    return objective.attacked_by(attack)
