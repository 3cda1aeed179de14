"""What a run counts: kept on the device step by step, read by the host once in a while."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bullettrain.mining import Category
from bullettrain.precision import widest

CLASSES = tuple(category.name.lower() for category in Category)
FIELDS = ("examples", "loss", *CLASSES, *(f"svar_{name}" for name in CLASSES), "clean", "robust_hits")


class Tally:
    """Sums over steps, on the device; :meth:`read` is the only wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(FIELDS), dtype=widest(device), device=device)
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

    def read(self, together: bool) -> Counts:
        """Everything since the last reading, over all processes, and start again from zero."""
        sums = torch.cat([self.sums, self.sums.new_full((1,), self.passes)])
        if together:
            dist.all_reduce(sums)
        self.sums.zero_()
        self.passes = 0.0
        return Counts(dict(zip((*FIELDS, "passes"), sums.tolist(), strict=True)))

    def peek(self) -> Counts:
        """What this process has counted since the last reading."""
        return Counts(dict(zip((*FIELDS, "passes"), [*self.sums.tolist(), self.passes], strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """The sums as they stand."""
        return {"sums": self.sums.tolist(), "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self.sums.copy_(torch.tensor(state["sums"], dtype=self.sums.dtype))
        self.passes = state["passes"]


@dataclass
class Counts:
    """Sums that the host has read."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*FIELDS, "passes"), 0.0))

    def __add__(self, other: Counts) -> Counts:
        return Counts({key: value + other.sums[key] for key, value in self.sums.items()})

    def averages(self, *, selects: bool, has_clean: bool) -> dict[str, float | None]:
        """Means an example; None for what this run does not have."""
        n = self.sums["examples"] or 1.0
        values: dict[str, float | None] = {
            "loss": self.sums["loss"] / n,
            "work": self.sums["passes"] / n,
            "clean_accuracy": self.sums["clean"] / n if has_clean else None,
            "robust_accuracy": self.sums["robust_hits"] / n,
        }
        for name in CLASSES:
            count = self.sums[name]
            values[name] = count / n
            values[f"svar_{name}"] = self.sums[f"svar_{name}"] / count if selects and count else None
        return values
