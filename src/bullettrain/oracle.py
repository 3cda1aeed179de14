"""The true classes, found by attacking every example: for studies of which examples matter."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from bullettrain.attacks import Norm, frozen, pgd
from bullettrain.attacks.norms import AUTO, Bounds, Limit, check_eps, find_norm
from bullettrain.brief import brief, one_line
from bullettrain.mining import Category, Separation, is_correct
from bullettrain.objectives import Objective
from bullettrain.validation import check_bounds, check_count, check_positive


class OracleSeparation:
    """The paper's MNIST study: boundary is what ``steps`` PGD steps break, robust what survives them.

    Far dearer than what it saves: it is there to study, not to train fast.

    Args:
        eps: radius of the ball; None: the objective's.
        steps: of the attack that decides, at least 1.
        step_size: its step; 1.7·eps/steps unless given.
        norm: "linf" or "l2"; None: the objective's, or "linf" where it has none.
        bounds: valid range of pixels; None: the objective's. Others than those are refused.
        generator: source of its noise.
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
        self.steps = check_count(steps, "steps")
        check_positive(steps, "steps")
        self.step_size = None if step_size is None else check_positive(step_size, "step_size")
        self.bounds, self.generator = None if bounds is None else check_bounds(bounds), generator
        self.passes_per_example = 2 * steps + 1

    __repr__ = one_line

    def suited_to(self, objective: Objective) -> OracleSeparation:
        """The same oracle with the objective's ball and bounds where it was given none; this one stays as it is."""
        if self.bounds is not None and not _same(self.bounds, objective.bounds):
            given, valid = (brief(bounds) for bounds in (self.bounds, objective.bounds))
            raise ValueError(
                f"the oracle's bounds are {given}, but the objective's are {valid}; leave the oracle's out, or give "
                "both the same"
            )
        suited, norm = copy.copy(self), getattr(objective, "norm", None)
        suited.norm, suited.bounds = self.norm or norm, objective.bounds
        if self.eps is None:
            if norm is None or suited.norm is not norm:
                why = "has no ball" if norm is None else "has one in another norm"
                raise ValueError(
                    f"give the oracle eps: it would be the objective's, but {type(objective).__name__} {why}"
                )
            suited.eps = objective.eps
        return suited

    def bind(self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor) -> Separation:
        """Attack the batch; what is returned gives the categories that the attack found."""
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
    """Whether two ranges are equal, numbers or tensors."""
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(bounds, others, strict=True))
