"""Free adversarial training: the backward of the update also moves the perturbation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bullettrain.allocation import Allocation
from bullettrain.attacks import Attack, Normalized
from bullettrain.attacks.norms import per_example
from bullettrain.attacks.pgd import AscentFunctions, AttackState
from bullettrain.baselines.fast import grown
from bullettrain.objectives import PGDAT
from bullettrain.validation import SettingsError


class Free(PGDAT):
    """Shafahi et al.: CE(h(x + δ), y), where δ ← δ + ε·sign of the gradient that the weights' own backward gives.

    There is no attack: a step is one forward and one backward. δ is carried from step to step, row by row, also to the
    next batch. Replay each batch m times in a row, and divide the number of epochs by m:

        train = baselines.one_step(baselines.Free(eps=8 / 255))
        for x, y in loader:
            for _ in range(8):
                out = train.step(model, x, y)
                out.loss.backward(); optimizer.step(); optimizer.zero_grad()

    ``out.loss.backward()`` moves δ; a step without it leaves δ unchanged. ``train.state_dict()`` contains δ.

    Args:
        eps: radius of the ball.
        norm: "linf" or "l2".
        bounds: see :class:`AdversarialObjective`.
    """

    options = ()
    one_by_one = carries_perturbations = moved_by_update = True
    needs_network = False
    step_passes = 0.0
    """The update's own backward moves δ: 3 passes per replay, as in ordinary training."""

    def set_up(self) -> None:
        """Start without a perturbation."""
        if isinstance(self.norm, Normalized) or isinstance(self.eps, Tensor):
            raise ValueError("Free carries perturbations over; give a number for eps, and norm 'linf' or 'l2'")
        self.attack = Attack(start="zero")
        self.delta: Tensor | None = None
        """(M, …) for the largest batch so far; row i belongs to example i of every batch."""
        self._size: Tensor | None = None
        """(M, 1, …) step sizes; a state like δ, because replayed graphs set no attributes."""

    def check_budget(self, budget: Allocation) -> None:
        """Allow one step for all examples."""
        super().check_budget(budget)
        if budget.uniform_steps != 1:
            raise SettingsError("Free needs one step for all examples; give", boundary=1, robust=1, outlier=1)

    def corrupt(self, net: nn.Module, attack: AttackState, rows: Tensor | None, fast: AscentFunctions | None) -> None:
        """Set x' to x + δ within bounds; the update's own backward moves δ."""
        delta, size = self.mutable_state(attack.clean)
        size.copy_(attack.size)
        attack.x_prime.copy_(self.norm.clip(attack.clean + delta, self.ball.on(attack.clean).bounds))

    def corrupted_input(self, x: Tensor, x_prime: Tensor) -> Tensor:
        """Return x' with a hook that moves δ in the backward of the loss."""
        carried, size = self.mutable_state(x)
        moved, (low, high) = x.detach() + carried, self.ball.on(x).bounds
        x_prime = self.norm.clip(moved, (low, high)).requires_grad_()

        def move(gradient: Tensor) -> None:
            # Where x + δ was clipped, δ has no effect; NaN from an overflow in float16 would stay in δ.
            active = (moved >= low) & (moved <= high) & gradient.isfinite()
            stepped = carried + size * self.norm.direction(gradient.where(active, 0.0))
            carried.copy_(self.norm.project(stepped, torch.zeros_like(x), self.eps, (-math.inf, math.inf)))

        x_prime.register_hook(move)  # type: ignore[no-untyped-call]
        return x_prime

    def mutable_state(self, x: Tensor) -> list[Tensor]:
        """Return δ and the step sizes for the rows of ``x`` (m, …), as views; new rows are 0."""
        self.delta = grown(self.delta, x)
        self._size = grown(self._size, per_example(x.flatten(1)[:, 0], x))
        return [self.delta[: len(x)], self._size[: len(x)]]

    def state_dict(self) -> dict[str, Any]:
        """Return δ."""
        return {"delta": None if self.delta is None else self.delta.detach().cpu().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        delta = state.get("delta")
        self.delta = None if delta is None else delta.clone()
