"""FAST and N-FGSM, which are settings of the attack; and what the single-step baselines share."""

from __future__ import annotations

import torch
from torch import Tensor

from bullettrain.allocation import StepBudget
from bullettrain.attacks import Attack
from bullettrain.objectives import AdversarialObjective
from bullettrain.step import BulletTrain

FAST = Attack(start="clipped")
"""Wong et al.: start at a uniform point of the ball, clipped to valid pixels."""

N_FGSM = Attack(start="clipped", radius=2.0, project=False)
"""De Jorge et al.: start with uniform noise of twice the radius, without projection."""


ONE_STEP = StepBudget.uniform(1, scale=1.0)
"""One step of ε for all examples."""


def fast_budget(steps: int = 1) -> StepBudget:
    """Return a budget of one step of 1.25·ε, or of several steps of 1.7·ε/N."""
    return StepBudget.uniform(steps, scale=1.25 if steps == 1 else 1.7)


def fast(objective: AdversarialObjective, *, steps: int = 1) -> BulletTrain:
    """FAST: the objective with one large FGSM step for all examples, or with a few (multi-step FAST).

    Args:
        objective: PGDAT, TRADES or MART with its settings.
        steps: N; the paper compares with 1 to 5.
    """
    return BulletTrain(attacked(objective, FAST), budget=fast_budget(steps))


def n_fgsm(objective: AdversarialObjective) -> BulletTrain:
    """N-FGSM: noise of ±2ε, one step of ε from there, no projection. Its authors use PGDAT."""
    return BulletTrain(attacked(objective, N_FGSM), budget=ONE_STEP)


def attacked(objective: AdversarialObjective, attack: Attack) -> AdversarialObjective:
    """Return the same objective with another attack; raise TypeError if it has an attack of its own."""
    own = getattr(type(objective), "corrupt", None)
    if own is not AdversarialObjective.corrupt or not objective.takes("attack"):
        name = getattr(objective, "__name__", type(objective).__name__)
        raise TypeError(f"the objective is {name}; give PGDAT, TRADES or MART, e.g. TRADES(eps=8/255)")
    return objective.attacked_by(attack)


def one_step(objective: AdversarialObjective) -> BulletTrain:
    """Return a training step with one step of ε for all examples, for `GAT`, `NuAT`, `FGSMPGI`, `GradAlign` and `Free`.

    `Free` and `FGSMPGI` need a loop of their own, see there.
    """
    return BulletTrain(objective, budget=ONE_STEP)


def grown(kept: Tensor | None, x: Tensor) -> Tensor:
    """Return ``kept``, the rows of earlier batches, with at least as many rows as ``x`` (m, …); new rows are 0.

    It is the same tensor, where captured graphs find it, unless the batch is larger or of another kind.
    """
    if kept is None or kept.shape[1:] != x.shape[1:]:
        return torch.zeros_like(x)
    missing = torch.zeros_like(x[len(kept) :])
    return torch.cat([kept.to(x), missing]) if len(missing) else kept.to(x)
