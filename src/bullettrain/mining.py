"""Boundary example mining: which examples get the attack steps.

The paper's rule is two pure functions of tensors; F_R is kept by one small class:

    svar     = signed_prediction_variance(logits, labels)   # how far from the boundary, and on which side
    category = separate(svar, robust_fraction)              # outlier / boundary / robust

None of them synchronises with the device. Scores are computed in at least float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bullettrain.precision import accumulation_dtype, at_least_float32
from bullettrain.validation import check_number

Score = Callable[[Tensor, Tensor], Tensor]
"""``score(logits (m, K), labels (m,)) -> (m,)``: negative where misclassified, larger where safer."""

Separation = Callable[[Tensor, Tensor], Tensor]
"""``separation(score (m,), robust_fraction) -> (m,)`` integers of :class:`Category`; F_R is a 0-d tensor.

A separation with a true attribute ``over_batches`` also takes scores (k, m) of k batches, and separates each of them,
which is faster where several mini-batches are attacked together.
"""


class Category(IntEnum):
    """The category of an example for the current network.

    Attributes:
        OUTLIER: 0, misclassified without any corruption.
        BOUNDARY: 1, classified correctly, and expected to be misclassified when corrupted.
        ROBUST: 2, classified correctly, and expected to stay so when corrupted.
    """

    OUTLIER = 0
    BOUNDARY = 1
    ROBUST = 2


# ---------------------------------------------------------------------------------------------- scores


def signed_prediction_variance(logits: Tensor, labels: Tensor) -> Tensor:
    """SVar: the population variance of the class probabilities, negative for wrong predictions.

    Args:
        logits: (m, K).
        labels: (m,) class indices.

    Returns:
        (m,) floats in [−1/4, 1/4]. A misclassified example with a uniform softmax gets −0.0, whose sign counts.
    """
    variance = at_least_float32(logits).softmax(dim=1).var(dim=1, correction=0)
    return torch.where(is_correct(logits, labels), variance, -variance)


def signed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy as a score: log K − CE where correct (CE < log K there), −CE where not."""
    ce = nn.functional.cross_entropy(at_least_float32(logits), labels, reduction="none")
    return torch.where(is_correct(logits, labels), (math.log(logits.shape[1]) - ce).clamp_min(0), -ce)


def signed_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Probability of the true class minus the largest other one; in a tie the sign is that of the prediction."""
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
    """A uniform random score with the sign of the prediction: the control that any score has to beat."""
    draw = torch.rand_like(at_least_float32(logits[:, 0]))
    return torch.where(is_correct(logits, labels), draw, -draw)


# ------------------------------------------------------------------------------------------ separation


def separate(svar: Tensor, robust_fraction: float | Tensor) -> Tensor:
    """The paper's rule f: outliers by sign, then the upper F_R of the batch is robust.

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
    """A separation that needs the network, as an oracle does. It is bound to each batch before it is called.

    It may also have ``suited_to(objective)``, which returns the separation for that objective, and raises ValueError if
    the two do not go together.
    """

    passes_per_example: int
    """Forward and backward passes per example, counted into the work of a step."""

    def bind(self, model: nn.Module, x: Tensor, y: Tensor, logits: Tensor) -> Separation:
        """Return the separation for this batch: ``x`` (m, …), ``y`` (m,), ``logits`` (m, K)."""
        ...


# ----------------------------------------------------------------------------------------------- F_R


class RobustFraction:
    """F_R: a moving average of the robust accuracy, scaled by γ, that predicts the share of robust examples.

    F_R ← p·F_R + (1 − p)·γ·(share of examples with argmax z' = y), from 0.

    Args:
        gamma: γ in (0, 1]; with a smaller γ more examples count as boundary.
        momentum: p in [0, 1).
    """

    def __init__(self, gamma: float = 0.8, momentum: float = 0.9) -> None:
        self.gamma, self.momentum = gamma, momentum
        self._value = torch.zeros((), dtype=torch.float64)

    def __setattr__(self, name: str, value: Any) -> None:
        limits: Any = {"gamma": {"above": 0, "most": 1}, "momentum": {"least": 0, "below": 1}}.get(name)
        super().__setattr__(name, value if limits is None else check_number(value, name, **limits))

    @property
    def value(self) -> Tensor:
        """F_R as a 0-d tensor, a copy that later updates do not change."""
        return self._value.clone()

    @property
    def live(self) -> Tensor:
        """The tensor that holds F_R and is updated in place."""
        return self._value

    def to(self, device: torch.device) -> None:
        """Move F_R to a device. On the same device it stays in place, where captured graphs read it."""
        if self._value.device != device:
            self._value = self._value.to(device, accumulation_dtype(device))

    def update(self, z_prime: Tensor, y: Tensor) -> None:
        """Update F_R with one mini-batch.

        Args:
            z_prime: (m, K) corrupted logits, or (v, m, K) for v views, whose indicators are averaged.
            y: (m,) labels.
        """
        self.update_from(self.counts(z_prime, y))

    @staticmethod
    def counts(z_prime: Tensor, y: Tensor) -> Tensor:
        """Return (2,) the number of correct predictions and the number of predictions."""
        correct = (z_prime.detach().argmax(dim=-1) == y).to(accumulation_dtype(y.device))
        return torch.stack([correct.sum(), correct.new_full((), correct.numel())])

    def update_from(self, counts: Tensor) -> None:
        """Update F_R with the :meth:`counts` of one mini-batch."""
        share = counts[0] / counts[1]
        self.to(share.device)
        self._value.mul_(self.momentum).add_((1 - self.momentum) * self.gamma * share)

    def state_dict(self) -> dict[str, float]:
        """Return F_R, γ and p as floats."""
        return {"value": float(self._value), "gamma": self.gamma, "momentum": self.momentum}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load the result of :meth:`state_dict`, including γ and p."""
        value = check_number(state["value"], "value", least=0, most=1)
        given = RobustFraction(state["gamma"], state["momentum"])  # checked before anything is changed
        self.gamma, self.momentum = given.gamma, given.momentum
        self._value.fill_(value)  # in place: captured graphs read it


def is_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (m,) booleans: whether the argmax of logits (m, K) is the label; in a tie the first class counts."""
    if labels.is_floating_point():
        raise TypeError(f"labels are {labels.dtype}; give class indices as int64")
    return logits.argmax(dim=1) == labels
