"""Training metrics: sums kept on the device at every step, and read by the host once in a while."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bullettrain.config.method import MethodConfig
from bullettrain.cost import theoretical_speedup
from bullettrain.mining import Category
from bullettrain.objectives import Objective
from bullettrain.precision import accumulation_dtype
from bullettrain.run_folder import SHARES

ON_DEVICE = ("examples", "loss", *SHARES, *(f"svar_{name}" for name in SHARES), "clean", "robust_hits")
FIELDS = (*ON_DEVICE, "passes", "left_out")


class Sums(dict[str, float]):
    """Sums over steps, by the names in FIELDS; zeros by default."""

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        super().__init__({**dict.fromkeys(FIELDS, 0.0), **(values or {})})

    def __add__(self, other: Mapping[str, float]) -> Sums:
        return Sums({name: value + other[name] for name, value in self.items()})

    def averages(self, *, has_scores: bool, has_clean: bool) -> dict[str, Any]:
        """Return means per example; None for what the run does not measure.

        "work" is per example of the dataset, those that an epoch leaves out included; all others are of steps.
        """
        n = self["examples"] or 1.0
        means: dict[str, float | None] = {
            "loss": self["loss"] / n,
            "work": self["passes"] / (n + self["left_out"]),
            "clean_accuracy": self["clean"] / n if has_clean else None,
            "robust_accuracy": self["robust_hits"] / n,
        }
        for name in SHARES:
            means[name] = self[name] / n
            means[f"svar_{name}"] = self[f"svar_{name}"] / self[name] if has_scores and self[name] else None
        return means


class StepMetrics:
    """Accumulates sums on the device. Only :meth:`read` and :meth:`peek` wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(ON_DEVICE), dtype=accumulation_dtype(device), device=device)
        self.passes = 0.0
        self.left_out = 0.0
        """Examples that were left out, counted with each step in proportion."""

    def add(
        self,
        loss: Tensor,
        z: Tensor | None,
        z_prime: Tensor,
        y: Tensor,
        category: Tensor,
        svar: Tensor | None,
        loss_weight: float,
    ) -> None:
        """Add a step of this process, without its passes. ``loss_weight`` turns its loss into a sum over examples."""
        # Not F.one_hot, which reads its input on the host.
        classes = torch.arange(len(Category), device=category.device)
        one_hot = (category[:, None] == classes).to(self.sums.dtype)
        score = torch.zeros_like(y, dtype=self.sums.dtype) if svar is None else svar.to(self.sums.dtype)
        hits = (z_prime.argmax(dim=-1) == y).to(self.sums.dtype)
        clean = torch.zeros_like(self.sums[0]) if z is None else (z.argmax(dim=1) == y).sum()
        parts = [
            self.sums.new_full((1,), len(y)),
            (loss.detach() * loss_weight).view(1),
            one_hot.sum(dim=0),
            (score[:, None] * one_hot).sum(dim=0),  # a matrix product in float64 is slow on a GPU
            clean.view(1),
            hits.view(-1, len(y)).mean(dim=0).sum().view(1),
        ]
        self.sums += torch.cat([part.to(self.sums.dtype) for part in parts])

    def read(self, together: bool) -> Sums:
        """Return the sums since the last call and reset them; ``together``: summed over all processes."""
        sums = torch.cat([self.sums, self.sums.new_tensor([self.passes, self.left_out])])
        if together:
            dist.all_reduce(sums)
        self.sums.zero_()
        self.passes = self.left_out = 0.0
        return Sums(dict(zip(FIELDS, sums.tolist(), strict=True)))

    def peek(self) -> Sums:
        """Return the sums of this process since the last :meth:`read`."""
        return Sums(dict(zip(FIELDS, [*self.sums.tolist(), self.passes, self.left_out], strict=True)))

    def restore(self, sums: Mapping[str, float]) -> None:
        """Continue from what :meth:`peek` returned."""
        self.sums.copy_(torch.tensor([sums[name] for name in ON_DEVICE], dtype=self.sums.dtype))
        self.passes, self.left_out = sums["passes"], sums.get("left_out", 0.0)


def speedups(objective: Objective, method: MethodConfig, figures: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the theoretical speed-up and that of counted work, from a run's own shares and passes.

    The theoretical one is the paper's formula for steps by category; it is None for other allocations, and if
    epochs leave examples out or the first updates are clean.
    """
    budget, theoretical = method.budget(), None
    plain = objective.cost.work(steps=budget.boundary, touched=1, selects=False).total
    if method.allocation == "categories" and not (method.leave_out or method.clean_warmup):
        shares = {name: figures[name] for name in SHARES}
        theoretical = theoretical_speedup(budget, **shares, views=objective.num_views)
    return {
        "plain_work": plain,
        "theoretical_speedup": theoretical,
        "work_speedup": plain / figures["work"] if figures["work"] else None,
    }
