"""The true classes, found by attacking every example: for studies of which examples matter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bullettrain.attacks import Norm, frozen, pgd
from bullettrain.attacks.norms import find_norm
from bullettrain.checks import check_bounds, check_count, check_positive
from bullettrain.mining import Category, Separation, is_correct


class OracleSeparation:
    """The paper's MNIST study: boundary is what ``steps`` PGD steps break, robust what survives them.

    Far dearer than what it saves: it is there to study, not to train fast.

    Args:
        eps: radius of the ball.
        steps: of the attack that decides, at least 1.
        step_size: its step; 1.7·eps/steps unless given.
        norm: "linf" or "l2".
        bounds: valid range of pixels.
        generator: source of its noise.
    """

    def __init__(
        self,
        *,
        eps: float,
        steps: int = 10,
        step_size: float | None = None,
        norm: str | Norm = "linf",
        bounds: tuple[float, float] = (0.0, 1.0),
        generator: torch.Generator | None = None,
    ) -> None:
        self.eps, self.steps = check_positive(eps, "eps"), check_count(steps, "steps")
        check_positive(steps, "steps")
        self.step_size = check_positive(1.7 * eps / steps if step_size is None else step_size, "step_size")
        self.norm = find_norm(norm)
        self.bounds, self.generator = check_bounds(bounds), generator
        self.passes_per_example = 2 * steps + 1

    def bind(self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor) -> Separation:
        """Attack the batch; what is returned gives the categories that the attack found."""
        x_adv = pgd(
            model,
            x,
            y,
            eps=self.eps,
            steps=self.steps,
            step_size=self.step_size,
            norm=self.norm,
            random_start="uniform",
            generator=self.generator,
            bounds=self.bounds,
            check=False,
        )
        with frozen(model), torch.no_grad():
            survives = is_correct(model(x_adv), y)
        category = torch.where(survives, int(Category.ROBUST), int(Category.BOUNDARY))
        category = torch.where(is_correct(logits, y), category, int(Category.OUTLIER))
        return lambda score, robust_fraction: category
