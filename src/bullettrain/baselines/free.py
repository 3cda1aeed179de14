"""Free adversarial training: the backward that teaches the weights also moves the perturbation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bullettrain.allocation import Allocation, StepBudget
from bullettrain.attacks import Attack, Norm, Normalized
from bullettrain.attacks.norms import AUTO, Bounds
from bullettrain.attacks.pgd import AscentFunctions, AttackState
from bullettrain.objectives import PGDAT
from bullettrain.step import BulletTrain


class Free(PGDAT):
    """Shafahi et al.: CE(h(x + δ), y), where δ ← δ + ε·sign of the gradient that the weights' own backward gives.

    There is no attack: a step is one forward and one backward. δ is carried from step to step, row by row of the
    batch, also to the next batch; each batch is to be replayed m times in a row, for epochs ÷ m:

        train = baselines.free(baselines.Free(eps=8 / 255))
        for x, y in loader:
            for _ in range(8):
                out = train.step(model, x, y)
                out.loss.backward(); optimizer.step(); optimizer.zero_grad()

    ``out.loss.backward()`` moves δ; a step without it leaves δ as it was. ``train.state_dict()`` carries δ.

    Args:
        eps: radius of the ball.
        norm: "linf" or "l2".
        bounds: valid range of pixels; None: any are.
    """

    def __init__(
        self, *, eps: float = 8 / 255, norm: str | Norm = "linf", bounds: Bounds | Literal["auto"] | None = AUTO
    ) -> None:
        super().__init__(eps=eps, norm=norm, bounds=bounds, attack=Attack(start="zero"))
        if isinstance(self.norm, Normalized) or isinstance(self.eps, Tensor):
            raise ValueError(
                "Free carries perturbations from image to image; give a number for eps and norm 'linf' or 'l2'"
            )
        self.delta: Tensor | None = None
        """(M, …) of the largest batch so far; row i is that of every batch's example i."""

    whole_step = True
    step_passes = 0.0
    """What moves δ is part of the update's own backward: 3 passes a replay, as ordinary training."""

    def check_budget(self, budget: Allocation) -> None:
        """One step for everyone."""
        if budget.uniform_steps != 1:
            raise ValueError("Free was given other than one step for everyone; use free_budget()")

    def corrupt(self, net: nn.Module, attack: AttackState, rows: Tensor | None, fast: AscentFunctions | None) -> None:
        """x + δ (m, …) in bounds; the update's own backward moves δ. ``start`` is not needed."""
        self._size = attack.size
        attack.x_prime.copy_(self.norm.clip(attack.clean + self._rows(attack.clean), self.bounds))

    def learns_from(self, x: Tensor, x_prime: Tensor) -> Tensor:
        """x', with a hook by which the backward of the loss moves δ."""
        carried, size = self._rows(x), self._size
        moved, (low, high) = x.detach() + carried, self.bounds
        x_prime = self.norm.clip(moved, self.bounds).requires_grad_()

        def move(gradient: Tensor) -> None:
            # Where x + δ was clipped, δ has no effect; and NaN of an overflow in float16 would stay in δ for good.
            heard = (moved >= low) & (moved <= high) & gradient.isfinite()
            stepped = carried + size * self.norm.direction(gradient.where(heard, 0.0))
            carried.copy_(self.norm.project(stepped, torch.zeros_like(x), self.eps, (-math.inf, math.inf)))

        x_prime.register_hook(move)  # type: ignore[no-untyped-call]
        return x_prime

    def _rows(self, x: Tensor) -> Tensor:
        """The part of δ that belongs to a batch x (m, …), as a view; 0 where there was none."""
        old = self.delta
        if old is None or old.shape[1:] != x.shape[1:]:
            self.delta = torch.zeros_like(x)
        elif len(old) < len(x):
            self.delta = torch.cat([old.to(x), torch.zeros_like(x[len(old) :])])
        else:
            self.delta = old.to(x)  # the same tensor where device and type are
        return self.delta[: len(x)]

    def mutable_state(self, x: Tensor) -> list[Tensor]:
        """δ of the rows of ``x`` (m, …)."""
        return [self._rows(x)]

    def state_dict(self) -> dict[str, Any]:
        """δ."""
        return {"delta": None if self.delta is None else self.delta.detach().cpu().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        delta = state.get("delta")
        self.delta = None if delta is None else delta.clone()


def free_budget() -> StepBudget:
    """One move of ε with each update."""
    return StepBudget.uniform(1, scale=1.0)


def free(objective: Free) -> BulletTrain:
    """Free with its one move of ε an update, for everyone. Replaying each batch is up to the loop."""
    if not isinstance(objective, Free):
        raise TypeError(f"the objective is {type(objective).__name__}; give Free, e.g. Free(eps=8/255)")
    return BulletTrain(objective, budget=free_budget())
