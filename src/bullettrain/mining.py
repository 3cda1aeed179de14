"""Boundary example mining: which examples deserve the effort.

The paper's rule in two pure functions over tensors, with F_R kept by one small class:

    svar     = signed_prediction_variance(logits, labels)   # how far from the boundary, and on which side
    category = separate(svar, robust_fraction)              # outlier / boundary / robust

None of them waits for the device. Scores are computed in at least float32; float64 stays float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bullettrain.precision import accumulation_dtype, at_least_float32
from bullettrain.validation import check_fraction

if TYPE_CHECKING:
    from bullettrain.objectives import Objective

Score = Callable[[Tensor, Tensor], Tensor]
"""``score(logits (m, K), labels (m,)) -> (m,)``: negative where misclassified, larger where safer."""

Separation = Callable[[Tensor, Tensor], Tensor]
"""``separation(score (m,), robust_fraction) -> (m,)`` integers of :class:`Category`; F_R comes as a 0-d tensor.

One with an attribute ``over_batches`` that is true also takes (k, m), k batches of which each is separated by itself.
"""


class Category(IntEnum):
    """What an example is to the current network."""

    OUTLIER = 0
    """Misclassified as it is."""
    BOUNDARY = 1
    """Classified correctly, and expected to be lost when corrupted."""
    ROBUST = 2
    """Classified correctly, and expected to stay so when corrupted."""


# ---------------------------------------------------------------------------------------------- scores


def signed_prediction_variance(logits: Tensor, labels: Tensor) -> Tensor:
    """SVar: the population variance of the class probabilities, negative where the prediction is wrong.

    Args:
        logits: (m, K).
        labels: (m,) class indices.

    Returns:
        (m,) floats in [−1/4, 1/4]. A misclassified example with a uniform softmax gets −0.0: its sign counts.
    """
    variance = at_least_float32(logits).softmax(dim=1).var(dim=1, correction=0)
    return torch.where(is_correct(logits, labels), variance, -variance)


def signed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy as a score: log K − CE where correct (CE < log K there), −CE where not."""
    ce = nn.functional.cross_entropy(at_least_float32(logits), labels, reduction="none")
    return torch.where(is_correct(logits, labels), (math.log(logits.shape[1]) - ce).clamp_min(0), -ce)


def signed_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Probability of the true class less the largest other one; the sign is the prediction's, also in a tie."""
    p = at_least_float32(logits).softmax(dim=1)
    true = p.gather(1, labels[:, None])[:, 0]
    other = p.scatter(1, labels[:, None], -1.0).amax(dim=1)
    margin = (true - other).abs()
    return torch.where(is_correct(logits, labels), margin, -margin)


def signed_gradient_norm(logits: Tensor, labels: Tensor) -> Tensor:
    """Norm of the loss gradient at the logits, ‖softmax − onehot‖₂ ≤ √2: √2 − norm where correct, −norm where not."""
    p = at_least_float32(logits).softmax(dim=1)
    norm = (p - nn.functional.one_hot(labels, logits.shape[1])).norm(dim=1)
    return torch.where(is_correct(logits, labels), (math.sqrt(2) - norm).clamp_min(0), -norm)


def random_score(logits: Tensor, labels: Tensor) -> Tensor:
    """A uniform draw with the prediction's sign: the control that any score has to beat."""
    draw = torch.rand_like(at_least_float32(logits[:, 0]))
    return torch.where(is_correct(logits, labels), draw, -draw)


# ------------------------------------------------------------------------------------------ separation


def separate(svar: Tensor, robust_fraction: float | Tensor) -> Tensor:
    """The paper's rule f: outliers by sign, then the upper F_R of the whole batch is robust.

    The threshold is the (1 − F_R) quantile of ``svar`` over all m examples, outliers included, linearly
    interpolated; an example at the threshold is robust.

    Args:
        svar: (m,) signed scores; (k, m) are k batches, each with a quantile of its own.
        robust_fraction: F_R in [0, 1], a number or a 0-d tensor.

    Returns:
        Like ``svar``, int64 of :class:`Category`.
    """
    wide_svar = svar.to(accumulation_dtype(svar.device))
    F_R = robust_fraction if torch.is_tensor(robust_fraction) else wide_svar.new_full((), robust_fraction)
    boundary = wide_svar < torch.quantile(wide_svar, 1 - F_R.to(wide_svar), dim=-1, keepdim=True)
    category = torch.where(boundary, int(Category.BOUNDARY), int(Category.ROBUST))
    # signbit, not < 0: a uniform softmax that is wrong has SVar −0.0 and is an outlier.
    return torch.where(torch.signbit(svar), int(Category.OUTLIER), category)


@runtime_checkable
class SeparationWithModel(Protocol):
    """A separation that has to see the network, as an oracle does: bound to each batch before it is called."""

    passes_per_example: int
    """What it costs: forward and backward passes an example, counted into the step's work."""

    def bind(self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor) -> Separation:
        """The separation for this batch: ``x`` (m, …), ``y`` (m,), ``logits`` (m, K)."""
        ...


@runtime_checkable
class SeparationForObjective(SeparationWithModel, Protocol):
    """One that also takes settings from the objective that it is used with: asked for at every step."""

    def suited_to(self, objective: Objective) -> SeparationWithModel:
        """What separates for this objective; a ValueError where the two do not go together."""
        ...


# ----------------------------------------------------------------------------------------------- F_R


class RobustFraction:
    """F_R: the moving average of robust accuracy, scaled by γ, that predicts the share of robust examples.

    F_R ← p·F_R + (1 − p)·γ·(share of examples with argmax z' = y), from 0.

    Args:
        gamma: γ in (0, 1]; smaller is more careful (more examples count as boundary).
        momentum: p in [0, 1).
    """

    def __init__(self, gamma: float = 0.8, momentum: float = 0.9) -> None:
        self.gamma = check_fraction(gamma, "gamma", low_open=True)
        self.momentum = check_fraction(momentum, "momentum", high_open=True)
        self._value = torch.zeros((), dtype=torch.float64)

    @property
    def value(self) -> Tensor:
        """F_R, a 0-d tensor on the device of the logits seen last; later updates do not change it."""
        return self._value.clone()

    @property
    def live(self) -> Tensor:
        """The tensor that F_R is kept in, updated in place."""
        return self._value

    def to(self, device: torch.device) -> None:
        """Keep F_R there; it is updated in place, so that a captured graph finds it where it was."""
        if self._value.device != device:
            self._value = self._value.to(device, accumulation_dtype(device))

    def update(self, z_prime: Tensor, y: Tensor, *, group: dist.ProcessGroup | None = None) -> None:
        """Fold in one mini-batch.

        Args:
            z_prime: (m, K) corrupted logits, or (v, m, K) for v views, whose indicators are averaged.
            y: (m,) labels.
            group: worker processes over which numerator and denominator are summed; None: this one alone.
        """
        counts = self.counts(z_prime, y)
        if group is not None:
            dist.all_reduce(counts, group=group)
        self.move(counts)

    @staticmethod
    def counts(z_prime: Tensor, y: Tensor) -> Tensor:
        """(2,): how many predictions are right, of how many; what processes add up."""
        correct = (z_prime.detach().argmax(dim=-1) == y).to(accumulation_dtype(y.device))
        return torch.stack([correct.sum(), correct.new_full((), correct.numel())])

    def move(self, counts: Tensor) -> None:
        """Fold in the :meth:`counts` of one mini-batch."""
        share = counts[0] / counts[1]
        self.to(share.device)
        self._value.mul_(self.momentum).add_((1 - self.momentum) * self.gamma * share)

    def state_dict(self) -> dict[str, float]:
        """F_R, γ and p as plain numbers."""
        return {"value": float(self._value), "gamma": self.gamma, "momentum": self.momentum}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from :meth:`state_dict`, with its γ and p."""
        gamma = check_fraction(state["gamma"], "gamma", low_open=True)
        momentum = check_fraction(state["momentum"], "momentum", high_open=True)
        value = check_fraction(state["value"], "value")
        self.gamma, self.momentum = gamma, momentum
        self._value.fill_(value)  # in place, as everything that a captured graph looks at


def is_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """(m,) booleans: argmax of logits (m, K) is the label; of equal logits the first counts."""
    return logits.argmax(dim=1) == labels
