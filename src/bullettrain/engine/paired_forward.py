"""One training-mode forward of two batches, each with its own batch-norm statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from bullettrain.attacks.state import dynamic, training
from bullettrain.engine.frozen_copy import cast_layers
from bullettrain.precision import arithmetic, at_least_float32


class PairedForward(nn.Module):
    """Two batches in one training-mode forward, each with its own batch-norm statistics.

    Convolutions see one larger batch, but the result equals that of two consecutive forwards, running statistics
    included. Batch norms, with their parameters and statistics, are the network's own; in half precision convolutions
    and linear layers are copies. Call :meth:`prepare` before each forward and :meth:`give_back` after each backward.
    """

    _first = 0
    count: Tensor
    """Number of images of the first batch; a tensor, so that one compiled program serves all counts."""

    def __init__(self, network: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        some = next(network.parameters())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=some.device), persistent=False)
        split = _Split()
        norms = [norm for norm in network.modules() if isinstance(norm, _BatchNorm)]
        self.norms = [_PairedNorm(norm, index, split) for index, norm in enumerate(norms)]
        shared = [*network.parameters(), *network.buffers()]
        memo: dict[int, object] = {id(t): t for t in shared} | {id(paired.norm): paired for paired in self.norms}
        self.inner = _Inner(copy.deepcopy(network, memo), split, dtype)
        self.run: Callable[[Tensor, Tensor, Tensor], _Outcome] = self.inner
        self._pairs = [] if dtype is None else cast_layers(self.inner.copy, dtype)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the forward by `torch.compile` with these arguments."""
        # Dynamo is slow with the norms' autograd.Function: leave them to AOTAutograd.
        torch._dynamo.allow_in_graph(_normalise)  # type: ignore[no-untyped-call]
        self.run = torch.compile(self.inner, *args, **kwargs)

    def gradient_error(self, x: Tensor) -> float:
        """Return the error of the compiled gradients on images ``x``, see :func:`gradient_error`. Changes nothing.

        Compilers have silently lost the gradient of a norm.
        """
        inner, dtype = self.inner, self.inner.dtype
        buffers = [buffer.clone() for buffer in inner.buffers()]
        self.prepare(2 * len(x) // 3)
        exact = copy.deepcopy(inner).to(torch.float64 if dtype is None else torch.float32)
        exact.dtype = None
        images = (x if dtype is None else x.to(dtype)).to(next(exact.parameters()).dtype)
        with arithmetic("float32"):
            truth = _gradients(exact, exact, images, self.count)
        plain, compiled = (_gradients(run, inner, x, self.count) for run in (inner, self.run))
        with torch.no_grad():
            for buffer, value in zip(inner.buffers(), buffers, strict=True):
                buffer.copy_(value)
            return gradient_error(truth, plain, compiled)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return logits (n, K) of images of which the first ``count`` are one batch and the others another.

        Args:
            x: (n, …) images of both batches.
            valid: (n,) False for rows that only fill up the size; they have no effect. None: all are valid.
        """
        valid = torch.ones(len(x), dtype=torch.bool, device=x.device) if valid is None else valid
        logits, called, means, variances = self.run(x, self.count, valid)
        self._remember(called, means, variances, 2 if self._first < len(x) else 1)
        return logits

    @torch.no_grad()
    def _remember(self, called: list[int], means: list[Tensor], variances: list[Tensor], batches: int) -> None:
        """Update the running statistics as the norms would, one batch after the other.

        Args:
            called: indices of the norms in the order of their calls.
            means: (2, C) means of both batches, for each call.
            variances: (2, C) variances of both batches, for each call.
            batches: 1 or 2.
        """
        seen = list(zip([self.norms[index] for index in called], means, variances, strict=True))
        # All norms of one momentum at once, unless a norm is called twice.
        kinds = dict.fromkeys(paired.norm.momentum for paired, _, _ in seen)
        several = [[one for one in seen if one[0].norm.momentum == momentum] for momentum in kinds]
        for some in several if len(set(called)) == len(called) else [[one] for one in seen]:
            for part in range(batches):
                self._move(some, part)

    @staticmethod
    def _move(seen: list[tuple[_PairedNorm, Tensor, Tensor]], part: int) -> None:
        """Update the running statistics of norms with one momentum from one batch."""
        norms = [paired.norm for paired, _, _ in seen]
        values = {"running_mean": [mean[part] for _, mean, _ in seen], "running_var": [var[part] for _, _, var in seen]}
        for name, new in values.items():
            running = [getattr(norm, name) for norm in norms]
            alike = [value.to(old.dtype) for old, value in zip(running, new, strict=True)]
            torch._foreach_lerp_(running, alike, norms[0].momentum)  # type: ignore[arg-type]
        if tracked := [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]:
            torch._foreach_add_(tracked, 1)

    def prepare(self, count: int) -> None:
        """Copy the present weights; the first ``count`` images of the next forward are one batch."""
        self.count.fill_(count)
        self._first = count
        if self._pairs:
            with torch.no_grad():
                torch._foreach_copy_([mine for mine, _ in self._pairs], [theirs for _, theirs in self._pairs])

    def give_back(self) -> None:
        """Move the gradients of the copies to the network's weights, in the weights' precision."""
        pairs = [(mine.grad, theirs) for mine, theirs in self._pairs if mine.grad is not None]
        if not pairs:
            return
        wider = [torch.empty_like(theirs) for _, theirs in pairs]
        torch._foreach_copy_(wider, [gradient for gradient, _ in pairs])
        for gradient, (_, theirs) in zip(wider, pairs, strict=True):
            theirs.grad = gradient if theirs.grad is None else theirs.grad + gradient
        for mine, _ in self._pairs:
            mine.grad = None

    @staticmethod
    def suits(network: nn.Module, x: Tensor) -> bool:
        """Return whether one joint forward equals two forwards, by a trial on a batch ``x`` in double precision.

        It does not if examples interact outside of batch norms, or if the forward is random.
        """
        norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
        if len(x) < 5 or any(norm.running_mean is None or norm.momentum is None for norm in norms):
            return False
        if any(isinstance(module, _DropoutNd) and module.p for module in network.modules()):
            return False
        one, two = copy.deepcopy(network).double(), copy.deepcopy(network).double()
        images, count, cuda = x.double(), 2 * len(x) // 3, [x.device] if x.is_cuda else []
        try:
            with torch.random.fork_rng(devices=cuda), torch.no_grad(), training(one), training(two):
                paired = PairedForward(one, None)
                paired.prepare(count)
                together, apart = paired(images), torch.cat([two(images[:count]), two(images[count:])])
        except RuntimeError:  # the network insists on its precision
            return False
        pairs = [(together, apart), *zip(one.buffers(), two.buffers(), strict=True)]
        return all(bool((a - b).abs().max() <= 1e-8 * b.abs().max().clamp_min(1)) for a, b in pairs if b.numel())


_Outcome = tuple[Tensor, list[int], list[Tensor], list[Tensor]]
"""Logits; indices of the norms in the order of their calls; mean and variance (2, C) of each call."""


class _Split:
    """State that the norms of a network share during a forward."""

    batch: Tensor | None = None
    """(n,) batch of each row, 0 or 1; 2: filling row."""
    member: Tensor | None = None
    """(n, 2, 1, 1) the same, one-hot."""
    number: Tensor | None = None
    """(2, 1) number of rows of each batch, at least 1."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Tensor, Tensor]] = []

    def __deepcopy__(self, memo: dict[int, object]) -> _Split:
        return self


class _Inner(nn.Module):
    """The compiled part of a :class:`PairedForward`: everything but the running statistics."""

    def __init__(self, network: nn.Module, split: _Split, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.copy, self.split, self.dtype = network, split, dtype

    def forward(self, x: Tensor, count: Tensor, valid: Tensor) -> _Outcome:
        split = self.split
        later = torch.arange(len(x), device=x.device) >= count
        precision = at_least_float32(x[:1]).dtype
        split.batch = torch.where(valid, later.long(), 2)
        split.member = torch.stack([~later & valid, later & valid], dim=1).to(precision)[:, :, None, None]
        split.number = split.member.sum(dim=0)[:, :, 0].clamp_min(1)
        split.seen = []
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype is not None):
            logits: Tensor = self.copy(x if self.dtype is None else x.to(self.dtype))
        seen = split.seen
        split.batch, split.member, split.number, split.seen = None, None, None, []
        return logits, [index for index, _, _ in seen], [mean for _, mean, _ in seen], [var for _, _, var in seen]


class _PairedNorm(nn.Module):
    """A batch norm that normalises the rows of two batches separately."""

    def __init__(self, norm: _BatchNorm, index: int, split: _Split) -> None:
        super().__init__()
        self.norm, self.index, self.split = norm, index, split

    def forward(self, x: Tensor) -> Tensor:
        """x (n, C, …) normalised."""
        norm, split = self.norm, self.split
        if not norm.training:
            normal: Tensor = norm(x)
            return normal
        assert split.batch is not None
        assert split.member is not None
        assert split.number is not None
        number = split.number * x[0, 0].numel()
        y, mean, var = _normalise(x, norm.weight, norm.bias, split.batch, split.member, number, norm.eps)
        split.seen.append((self.index, mean, var))
        return y


def _normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, batch: Tensor, member: Tensor, number: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, var = _Normalise.apply(x, weight, bias, batch, member, number, eps)  # type: ignore[no-untyped-call]
    return y, mean, var


class _Normalise(torch.autograd.Function):
    """Batch norm of two concatenated batches, with its gradient in closed form.

    Sums over parts of each row come first, (n, C, P), then sums over the rows of a batch, (2, C): one pass over the
    images serves both batches, in kernels that a compiler fuses with their neighbours. Values are centred at the mean
    of the first row, so that squares do not cancel.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        batch: Tensor,
        member: Tensor,
        number: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y like x (n, C, …), and mean and unbiased variance, (2, C).

        Args:
            ctx: of autograd.
            x: (n, C, …).
            weight: (C,) or None.
            bias: (C,) or None.
            batch: (n,) batch of each row.
            member: (n, 2, 1, 1) the same, one-hot.
            number: (2, 1) number of values of a channel in each batch.
            eps: added to the variance.
        """
        first = at_least_float32(x[:1])
        centre = first.mean(dim=tuple(range(2, x.ndim)), keepdim=True) if x.ndim > 2 else first
        values = at_least_float32(x) - centre
        mean = _by_batch(member, _by_row(values)) / number
        var = (_by_batch(member, _by_row(values.square())) / number - mean.square()).clamp_min(0)
        inverse = (var + eps).rsqrt()
        scale = inverse if weight is None else inverse * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        ctx.save_for_backward(x, weight, centre, batch, member, number, mean, inverse)
        ctx.has_bias = bias is not None
        y = values * _spread(batch, scale, x) + _spread(batch, shift, x)
        if y.dtype != x.dtype:  # compiled by torch 2.11, a no-op conversion loses the gradient
            y = y.to(x.dtype)
        whole_mean = mean + centre.flatten()
        unbiased = var * (number / (number - 1).clamp_min(1))
        ctx.mark_non_differentiable(whole_mean, unbiased)
        return y, whole_mean, unbiased

    @staticmethod
    def backward(ctx, gradient: Tensor, *_: Tensor | None):  # type: ignore[no-untyped-def]
        """Of x, weight and bias: dx = scale·(g − mean of g − x̂·mean of g·x̂), as g·a + x·b + c."""
        x, weight, centre, batch, member, number, mean, inverse = ctx.saved_tensors
        values, g = at_least_float32(x) - centre, at_least_float32(gradient)
        total = _by_batch(member, _by_row(g))
        along = inverse * (_by_batch(member, _by_row(g * values)) - mean * total)  # Σ g·x̂
        scale = inverse if weight is None else inverse * weight
        slope = -scale * inverse * along / number
        offset = -slope * mean - scale * total / number
        dx = g * _spread(batch, scale, x) + values * _spread(batch, slope, x) + _spread(batch, offset, x)
        d_weight = None if weight is None else along.sum(dim=0)
        return dx.to(x.dtype), d_weight, total.sum(dim=0) if ctx.has_bias else None, None, None, None, None


def _by_row(values: Tensor) -> Tensor:
    """Return sums (n, C, P) of (n, C, …) over P parts of each row; with few channels one part would not fill a GPU."""
    if values.ndim == 2:
        return values[:, :, None]
    if values.ndim != 4:
        return values.flatten(2).sum(dim=2, keepdim=True)
    n, channels, height, width = values.shape
    parts = math.gcd(height, max(1, 256 // channels))
    return values.view(n, channels, parts, height // parts, width).sum(dim=(3, 4))


def _by_batch(member: Tensor, rows: Tensor) -> Tensor:
    """Return sums (2, C) of (n, C, P) over the rows of each batch."""
    return (member * rows.unsqueeze(1)).sum(dim=(0, 3))


def _spread(batch: Tensor, of_batch: Tensor, x: Tensor) -> Tensor:
    """Return the value (n, C, 1, …) of each row's batch, from (2, C); 0 for filling rows."""
    of_row = torch.nn.functional.pad(of_batch, (0, 0, 0, 1)).index_select(0, batch)
    return of_row.view(*of_row.shape, *(1,) * (x.ndim - 2))


def _gradients(
    run: Callable[[Tensor, Tensor, Tensor], _Outcome], network: nn.Module, x: Tensor, count: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a function of the logits for every parameter of ``network``, which ``run`` runs."""
    with torch.enable_grad():
        valid = dynamic(torch.ones(len(x), dtype=torch.bool, device=x.device))
        logits, *_ = run(x, count, valid)
        away = torch.linspace(-1, 1, logits.numel(), device=x.device).view(logits.shape)
        parameters = [p for p in network.parameters() if p.requires_grad]
        return torch.autograd.grad((at_least_float32(logits) * away).sum(), parameters, allow_unused=True)


def gradient_error(
    truth: Sequence[Tensor | None], plain: Sequence[Tensor | None], other: Sequence[Tensor | None]
) -> float:
    """Return the error of the gradients ``other`` in units of what rounding explains; above 1 they are wrong.

    The ``plain`` gradients differ from the ``truth`` by rounding alone. In bf16 the rounding error of an untrained deep
    network is as large as the gradients themselves. Therefore each of ``other`` may have three times the error of its
    ``plain`` counterpart, and all together one and a half times. Along the truth, where rounding averages out, each
    must agree with its counterpart to half the truth's length. A gradient that is 0 while its counterpart is not is
    infinitely wrong.
    """
    if any((a is None) != (b is None) for a, b in zip(plain, other, strict=True)):
        return math.inf
    found = [
        (t.double(), a.double(), b.double())
        for t, a, b in zip(truth, plain, other, strict=True)
        if t is not None and a is not None and b is not None
    ]
    if not found:
        return 0.0
    size, there, others = (torch.stack([three[i].norm() for three in found]) for i in range(3))
    blur, off = (torch.stack([(three[i] - three[0]).norm() for three in found]) for i in (1, 2))
    elements = torch.tensor([t.numel() for t, _, _ in found], device=size.device)
    along = torch.stack([(t * (a - b)).sum() for t, a, b in found]).abs() / size.clamp_min(1e-300)
    whole = size.norm().clamp_min(1e-300)
    all_blur, little = blur.norm(), 1e-3 * whole
    few = torch.maximum(blur, size * all_blur / whole)  # a few elements may be near the truth by chance
    blur = torch.where(elements < 16, few, blur)
    far = torch.stack(
        [
            off / (3 * blur + 0.01 * size + little),
            along / (0.5 * size + 3 * blur / elements.sqrt() + little),
            (off.norm() / (1.5 * all_blur + 0.01 * whole)).expand_as(off),
        ]
    )
    far[:, (others < 0.01 * there) & (there > little)] = math.inf
    return float(far.nan_to_num(nan=math.inf, posinf=math.inf).max())
