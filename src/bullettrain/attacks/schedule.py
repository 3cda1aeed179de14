"""Which examples are under attack at which iteration, from their step counts alone.

Ragged is the paper's way: iteration t forwards the examples with more than t steps. Packed lets examples with few steps
take turns in the place of one with many, so that every iteration has the same size: all steps stand in one line,
example after example, and are dealt out to places that have room for as many steps as the longest attack has
(McNaughton's wrap-around rule). No example meets itself, since none has more steps than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def ragged_sizes(counts: Sequence[int]) -> list[int]:
    """How many examples have more than t steps, for t = 0, 1, … up to the longest attack."""
    most = max(counts, default=0)
    sizes = [0] * most
    for count in counts:
        if count:
            sizes[count - 1] += 1
    for t in range(most - 2, -1, -1):
        sizes[t] += sizes[t + 1]
    return sizes


def ragged(steps: Tensor, counts: Sequence[int]) -> Iterator[Tensor | None]:
    """Rows (n,) at each iteration, those with the most steps first; None: all of them as they are.

    Args:
        steps: (m,) steps of each example.
        counts: the same on the host.
    """
    sizes = ragged_sizes(counts)
    if not sizes or sizes[-1] == len(counts):
        yield from [None] * len(sizes)
        return
    # Stable: examples with as many steps stay in their order, as in the plain algorithm.
    order = steps.argsort(descending=True, stable=True)
    for n in sizes:
        yield order[:n]


def packed_sizes(counts: Sequence[int], multiple: int = 1) -> list[int]:
    """Places at each iteration, rounded up to a multiple, and never more than there are examples."""
    total, most = sum(counts), max(counts, default=0)
    return [min(-(-(total - t) // most // multiple) * multiple, len(counts)) for t in range(min(most, total))]


def packed(steps: Tensor, most: int, places: int) -> Tensor:
    """Rows (most, places): who is at which place at each iteration; m is nobody.

    Args:
        steps: (m,) steps of each example, none more than ``most``.
        most: iterations.
        places: of :func:`packed_sizes`.
    """
    line = torch.arange(places, device=steps.device) * most + torch.arange(most, device=steps.device)[:, None]
    return torch.searchsorted(steps.cumsum(0), line, right=True)
