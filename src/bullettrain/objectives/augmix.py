"""AugMix: a consistency loss between an image and two random views of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.attacks.pgd import AscentFunctions, AttackState, take
from bullettrain.augmix import ViewMaker
from bullettrain.objectives.base import Objective, Selection, cross_entropy, mean_over, probabilities
from bullettrain.precision import at_least_float32
from bullettrain.validation import check_bounds, check_number, described, shown

Views = Callable[[Tensor], tuple[Tensor, Tensor]]
"""``views(x (n, …)) -> (x', x'')``, two corrupted copies of each example."""


class AugMix(Objective):
    """Hendrycks et al.: CE(z, y) + β·JSD(z, z', z''), β = 12, with x', x'' two random views of x.

    One step makes both views: use ``StepBudget(1, 0)`` with mining and ``StepBudget.uniform(1)`` without. The
    training-mode logits z are computed first and select.

    Args:
        views: settings of the views, or a function that makes two views of its examples.
        beta: weight of the JSD.
        jsd: False is "AugMix − JSD": CE(z', y) on one view x', without a clean forward.
        selection: see :class:`Objective`.
        bounds: valid range of pixels; [0, 1] for a :class:`ViewMaker`.
        generator: generator of the views. Views are drawn for the whole batch, so that those of an example do not
            depend on which others get any.
    """

    needs_network = takes_eps = False
    max_steps = 1
    options = ("beta", "selection", "jsd", "views")

    def __init__(
        self,
        *,
        views: ViewMaker | Views | None = None,
        beta: float = 12.0,
        jsd: bool = True,
        selection: Selection = "train",
        bounds: tuple[float, float] | None = (0.0, 1.0),
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(selection)
        self.views = ViewMaker() if views is None else views
        if isinstance(self.views, type) or not callable(self.views):
            raise TypeError(f"views are {shown(self.views)}; give a ViewMaker, or a function that makes two views of x")
        self.bounds = check_bounds(bounds)
        if isinstance(self.views, ViewMaker) and self.bounds != (0, 1):
            raise ValueError(f"bounds are {self.bounds}; AugMix makes views of images in [0, 1]; give your own views")
        self.beta = check_number(beta, "beta", above=0)
        self.jsd = self.has_clean_term = jsd
        self.num_views = 2 if jsd else 1
        self.generator = generator

    def draw(self, m: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor | None:
        """Draw the random numbers of the views of m examples, for ``start``; None if a function makes the views."""
        if not isinstance(self.views, ViewMaker):
            return None
        return self.views.draw(m, self.num_views, generator=generator, device=device)

    def initial_perturbation(self, x: Tensor) -> Tensor | None:
        """Draw the random numbers of the views of ``x`` (m, …); None if a function makes the views."""
        return self.draw(len(x), x.device, self.generator)

    def begin(self, x: Tensor, start: Tensor | None) -> Tensor:
        """Return the example itself as each view, (2, m, …); without the JSD (m, …)."""
        return x.detach().expand(2, *x.shape) if self.jsd else x.detach()

    def corrupt(self, net: nn.Module, attack: AttackState, rows: Tensor | None, fast: AscentFunctions | None) -> None:
        """Make the views of some examples from their draws, or take given views."""
        x, start = take(attack.clean, rows), attack.start
        x_prime = attack.x_prime if self.jsd else attack.x_prime[None]
        shape, m = tuple(attack.x_prime.shape), len(attack.clean)
        if start is None:
            views = self._from_function(x)
        elif tuple(start.shape) == shape:
            views = start if rows is None else start.index_select(self.num_views - 1, rows)
            views = views.view(self.num_views, len(x), *x.shape[1:]).to(x.dtype)
        else:
            wanted = (m, self.num_views, self.views.numbers) if isinstance(self.views, ViewMaker) else None
            if not isinstance(self.views, ViewMaker) or tuple(start.shape) != wanted:
                or_draws = f", or their draws, {wanted}" if wanted else ""
                raise ValueError(f"start has the shape {tuple(start.shape)}; give AugMix's views, {shape}{or_draws}")
            views = self.views(x, start if rows is None else start.index_select(0, rows))
        if rows is None:
            x_prime.copy_(views)
        else:
            x_prime.index_copy_(1, rows, views)

    def _from_function(self, x: Tensor) -> Tensor:
        """Return the views (num_views, n, …) of the user's function."""
        assert not isinstance(self.views, ViewMaker)
        made = self.views(x.detach())
        if torch.is_tensor(made) and made.ndim == x.ndim + 1:
            made = tuple(made)  # both in one
        wanted = f"it has to make two like x, {described(x)}"
        if not isinstance(made, (tuple, list)) or not all(torch.is_tensor(view) for view in made):
            raise TypeError(f"views made {described(made)}; {wanted}, as a pair of tensors")
        if len(made) != 2 or any(view.shape != x.shape or not view.is_floating_point() for view in made):
            kinds = ", ".join(described(view) for view in made[:3])
            raise ValueError(f"views made {len(made)}: {kinds}; {wanted}")
        return torch.stack(tuple(made[: self.num_views])).to(x.dtype)

    def fill_in(self, z: Tensor, corrupted_logits: Tensor | None, touched: Tensor | None) -> Tensor:
        """Return z' (2, m, K): z (m, K) with the logits (2·t, K) of both views of ``touched`` (t,) filled in."""
        both = torch.stack([z, z])
        if corrupted_logits is None:
            return both
        of_views = corrupted_logits.reshape(2, -1, z.shape[1]).to(z.dtype)
        return of_views if touched is None else both.index_copy(1, touched, of_views)

    def loss(
        self, z: Tensor | None, z_prime: Tensor, y: Tensor, touched: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """CE(z, y) + β·JSD, the mean KL of the three softmaxes to their mean, clamped to [1e-7, 1]."""
        if z is None:
            return cross_entropy(at_least_float32(z_prime), y, weight)
        z, z_prime = at_least_float32(z), at_least_float32(z_prime)
        three = (z, *z_prime) if touched is None else (z[touched], *z_prime[:, touched])
        softmaxes = [probabilities(logits) for logits in three]
        log_mean = torch.stack(softmaxes).mean(dim=0).clamp(1e-7, 1).log()
        jsd = torch.stack([F.kl_div(log_mean, p, reduction="none").sum(dim=1) for p in softmaxes]).mean(dim=0)
        return cross_entropy(z, y, weight) + self.beta * mean_over(jsd, len(y), weight, touched)
