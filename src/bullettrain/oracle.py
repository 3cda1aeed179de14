"""The true categories, found by attacking every example: for studies."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from bullettrain.attacks import Norm, frozen, pgd
from bullettrain.attacks.norms import AUTO, Bounds, Limit, check_eps, find_norm
from bullettrain.brief import brief, one_line
from bullettrain.mining import Category, Separation, is_correct
from bullettrain.objectives import Objective
from bullettrain.validation import check_bounds, check_count, check_number


class OracleSeparation:
    """The separation of the paper's MNIST study: PGD breaks boundary examples, and robust ones survive it.

    It costs far more than mining saves, and is meant for studies.

    Args:
        eps: radius of the ball; None: the objective's.
        steps: PGD steps, at least 1.
        step_size: of PGD; None: 1.7·eps/steps.
        norm: "linf" or "l2"; None: the objective's, or "linf" if it has none.
        bounds: valid range of pixels; None: the objective's. Other bounds than the objective's are refused.
        generator: generator of the noise.
    """

    def __init__(
        self,
        *,
        eps: Limit | None = None,
        steps: int = 10,
        step_size: float | None = None,
        norm: str | Norm | None = None,
        bounds: Bounds | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.norm = None if norm is None else find_norm(norm)
        self.eps = None if eps is None else check_eps(eps, self.norm or find_norm("linf"))
        self.steps = check_count(steps, "steps", least=1)
        self.step_size = None if step_size is None else check_number(step_size, "step_size", above=0)
        self.bounds, self.generator = None if bounds is None else check_bounds(bounds), generator
        self.passes_per_example = 2 * steps + 1

    __repr__ = one_line

    def suited_to(self, objective: Objective) -> OracleSeparation:
        """Return a copy with the objective's ball and bounds where none were given."""
        if self.bounds is not None and not _same(self.bounds, objective.bounds):
            given, valid = (brief(bounds) for bounds in (self.bounds, objective.bounds))
            raise ValueError(f"the oracle's bounds are {given}, but the objective's are {valid}; give the oracle none")
        suited, norm = copy.copy(self), getattr(objective, "norm", None)
        suited.norm, suited.bounds = self.norm or norm, objective.bounds
        if self.eps is None:
            if norm is None or suited.norm is not norm:
                why = "has no ball" if norm is None else "has one in another norm"
                raise ValueError(f"give the oracle eps: usually the objective's, but {type(objective).__name__} {why}")
            suited.eps = objective.eps
        return suited

    def bind(self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor) -> Separation:
        """Attack the batch, and return a separation with the categories that were found."""
        if self.eps is None:
            raise ValueError("the oracle has no eps; give it one, or that of an objective: suited_to(objective)")
        unit = 1.0 if isinstance(self.eps, Tensor) else self.eps
        x_adv = pgd(
            model,
            x,
            y,
            eps=self.eps,
            steps=self.steps,
            step_size=1.7 * unit / self.steps if self.step_size is None else self.step_size,
            norm=self.norm or "linf",
            random_start="uniform",
            generator=self.generator,
            bounds=self.bounds or AUTO,
            check=False,
        )
        with frozen(model), torch.no_grad():
            survives = is_correct(model(x_adv), y)
        category = torch.where(survives, int(Category.ROBUST), int(Category.BOUNDARY))
        category = torch.where(is_correct(logits, y), category, int(Category.OUTLIER))
        return lambda score, robust_fraction: category


def _same(bounds: Bounds, others: Bounds) -> bool:
    """Return whether two ranges, of numbers or tensors, are equal."""
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(bounds, others, strict=True))
