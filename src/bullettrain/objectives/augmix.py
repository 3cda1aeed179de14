"""AugMix's consistency loss, on views that are handed in."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.allocation import Cost
from bullettrain.attacks import bare
from bullettrain.attacks.state import Mode
from bullettrain.checks import check_positive
from bullettrain.objectives.base import Objective, forward, mean_over
from bullettrain.precision import wide

Views = Callable[[Tensor], tuple[Tensor, Tensor]]
"""``views(x (n, …)) -> (x', x'')``, two corrupted copies of each example."""


class AugMix(Objective):
    """Hendrycks et al.: CE(z, y) + β·JSD(z, z', z''), β = 12, with x', x'' two random views of x.

    One step is both views: budgets are ``StepBudget(1, 0)`` with mining and ``StepBudget.uniform(1)`` without.
    The training-mode logits z are computed first and select.

    Args:
        views: makes the two views of the examples that get any.
        beta: weight of the JSD.
        selection: see :class:`Objective`.
    """

    def __init__(self, *, views: Views | None = None, beta: float = 12.0, selection: Mode = "train") -> None:
        super().__init__(selection)
        self.views = views
        self.beta = check_positive(beta, "beta")

    @property
    def cost(self) -> Cost:
        """9 plain; 3 + 6·F_B with mining."""
        return Cost(selection=1 if self.selection == "eval" else 0, step=0, corrupted=6)

    def corrupt(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        s: Tensor | None,
        steps: Tensor,
        step_sizes: Tensor,
        *,
        start: Tensor | None = None,
    ) -> Tensor:
        """The two views (2, m, …); without a step both are x. ``start``: views that were made before, (2, m, …)."""
        if self.views is None and start is None:
            raise ValueError("AugMix has no views to train on; give views=, a function of x that makes two")
        if int(steps.max()) > 1:
            raise ValueError(f"AugMix was given {int(steps.max())} steps; a step is both views, so 1 or 0")
        if start is not None and start.shape != (2, *x.shape):
            raise ValueError(f"start has the shape {tuple(start.shape)}; give AugMix's views, {(2, *x.shape)}")
        both = torch.stack([x, x]).detach()
        rows = steps.nonzero()[:, 0].to(x.device, non_blocking=True)
        if len(rows):
            made = start[:, rows] if start is not None else self._make_views(x[rows])
            both.index_copy_(1, rows, made.to(x.dtype))
        return both

    def _make_views(self, x: Tensor) -> Tensor:
        """Both views (2, n, …) of some examples."""
        assert self.views is not None
        made = tuple(self.views(x.detach()))
        if len(made) != 2 or any(view.shape != x.shape for view in made):
            shapes = ", ".join(str(tuple(view.shape)) for view in made)
            raise ValueError(f"views made {len(made)} of shape {shapes}; it has to make two like x, {tuple(x.shape)}")
        return torch.stack(made)

    def corrupted_logits(self, model: nn.Module, x_prime: Tensor, z: Tensor | None, steps: Tensor) -> Tensor:
        """(2, m, K): the views of the touched examples in one training-mode forward; z twice for the others."""
        assert z is not None
        both = torch.stack([z, z])
        rows = steps.nonzero()[:, 0].to(z.device, non_blocking=True)
        if len(rows) == 0:
            return both
        logits = forward(bare(model), x_prime[:, rows].flatten(0, 1))
        return both.index_copy(1, rows, logits.reshape(2, len(rows), -1).to(z.dtype))

    def loss(self, z: Tensor | None, z_prime: Tensor, y: Tensor, touched: Tensor | None = None) -> Tensor:
        """CE(z, y) + β·JSD, the mean KL of the three softmaxes to their mean, clamped to [1e-7, 1]."""
        assert z is not None
        z, z_prime = wide(z), wide(z_prime)
        three = (z, *z_prime) if touched is None else (z[touched], *z_prime[:, touched])
        softmaxes = [F.softmax(logits, dim=1) for logits in three]
        log_mean = torch.stack(softmaxes).mean(dim=0).clamp(1e-7, 1).log()
        jsd = torch.stack([F.kl_div(log_mean, p, reduction="none").sum(dim=1) for p in softmaxes]).mean(dim=0)
        return F.cross_entropy(z, y) + self.beta * mean_over(jsd, len(y))
