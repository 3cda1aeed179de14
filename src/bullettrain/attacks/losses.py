"""Attack losses: one value per example, (n,), in at least float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bullettrain.validation import check_known, check_returned

AttackLoss = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
"""``loss(logits (n, K), labels (n,), target (n, K) or None) -> (n,)``, which the attack maximises.

A loss may have an attribute ``gradient``, a function of the same arguments that returns the gradient (n, K) of the sum
at the logits in closed form."""


def ce(logits: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
    """Cross-entropy with the label."""
    return F.cross_entropy(logits, labels, reduction="none")


def kl(logits: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
    """KL(target ‖ softmax of the logits), with probabilities ``target`` (n, K); labels are not used."""
    if target is None:
        raise ValueError("loss='kl' needs target=, the clean probabilities (m, K)")
    return F.kl_div(F.log_softmax(logits, dim=1), target, reduction="none").sum(dim=1)


def margin(logits: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
    """The largest wrong logit minus the true one: positive once the example is misclassified."""
    true = logits.gather(1, labels[:, None])[:, 0]
    other = logits.scatter(1, labels[:, None], float("-inf")).amax(dim=1)
    return other - true


LOSSES: dict[str, AttackLoss] = {"ce": ce, "kl": kl, "margin": margin}


def loss_named(name: str) -> AttackLoss:
    """Return the loss with this name."""
    return LOSSES[check_known(name, LOSSES, "there is no attack loss")]


def gradient_at_logits(loss: AttackLoss, logits: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
    """Return the gradient (n, K) of the summed loss at the logits, by autograd."""
    with torch.enable_grad():
        at = logits.detach().requires_grad_()
        values = check_returned(loss(at, labels, target), "the attack's loss", (len(labels),), "floating-point")
        (gradient,) = torch.autograd.grad(values.sum(), at)
    return gradient


def closed_form(loss: AttackLoss) -> AttackLoss:
    """Return :func:`gradient_at_logits` of a loss, in closed form if there is one: two kernels instead of twenty."""
    if loss is ce:
        return ce_gradient
    if loss is kl:
        return _kl_gradient
    own: AttackLoss | None = getattr(loss, "gradient", None)
    return own or (lambda logits, labels, target: gradient_at_logits(loss, logits, labels, target))


def ce_gradient(logits: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
    """Return the gradient of :func:`ce`."""
    true = labels[:, None] == torch.arange(logits.shape[1], device=logits.device)
    return logits.softmax(dim=1) - true.to(logits.dtype)


def _kl_gradient(logits: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
    assert target is not None
    return logits.softmax(dim=1) * target.sum(dim=1, keepdim=True) - target  # a target of one's own may not sum to 1
