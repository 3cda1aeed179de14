"""What a run measures: sums kept on the device step by step, and read by the host once in a while."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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

FIELDS = ("examples", "loss", *SHARES, *(f"svar_{name}" for name in SHARES), "clean", "robust_hits")


class StepMetrics:
    """Sums over steps, on the device; :meth:`read` is the only wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(FIELDS), dtype=accumulation_dtype(device), device=device)
        self.passes = 0.0

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
        """One step of this process, but for its passes; ``loss_weight`` makes its loss a sum over examples."""
        # By comparison: F.one_hot looks at its input, for which a CPU's recording would have to wait.
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
        """Everything since the last reading, over all processes, and start again from zero."""
        sums = torch.cat([self.sums, self.sums.new_full((1,), self.passes)])
        if together:
            dist.all_reduce(sums)
        self.sums.zero_()
        self.passes = 0.0
        return Sums(dict(zip((*FIELDS, "passes"), sums.tolist(), strict=True)))

    def peek(self) -> Sums:
        """What this process has counted since the last reading."""
        return Sums(dict(zip((*FIELDS, "passes"), [*self.sums.tolist(), self.passes], strict=True)))

    def restore(self, sums: Mapping[str, float]) -> None:
        """Continue from what :meth:`peek` gave."""
        self.sums.copy_(torch.tensor([sums[name] for name in FIELDS], dtype=self.sums.dtype))
        self.passes = sums["passes"]


@dataclass
class Sums:
    """Sums that the host has read."""

    values: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*FIELDS, "passes"), 0.0))

    def __add__(self, other: Sums) -> Sums:
        return Sums({key: value + other.values[key] for key, value in self.values.items()})

    def averages(self, *, selects: bool, has_clean: bool) -> dict[str, Any]:
        """Means an example; None for what this run does not have."""
        n = self.values["examples"] or 1.0
        found: dict[str, float | None] = {
            "loss": self.values["loss"] / n,
            "work": self.values["passes"] / n,
            "clean_accuracy": self.values["clean"] / n if has_clean else None,
            "robust_accuracy": self.values["robust_hits"] / n,
        }
        for name in SHARES:
            count = self.values[name]
            found[name] = count / n
            found[f"svar_{name}"] = self.values[f"svar_{name}"] / count if selects and count else None
        return found


def speedups(objective: Objective, method: MethodConfig, figures: Mapping[str, float]) -> dict[str, float | None]:
    """Theoretical and counted, from a run's own shares and passes; wall-clock needs a second run beside it.

    The paper's formula, the theoretical one, is of steps by class; other allocations have none.
    """
    budget = method.budget()
    plain = objective.cost.work(steps=budget.boundary, touched=1, selects=False).total
    outlier, boundary, robust = (figures[name] for name in SHARES)
    return {
        "plain_work": plain,
        "theoretical_speedup": theoretical_speedup(
            budget, boundary=boundary, robust=robust, outlier=outlier, views=objective.num_views
        )
        if method.allocation == "categories"
        else None,
        "work_speedup": plain / figures["work"] if figures["work"] else None,
    }
