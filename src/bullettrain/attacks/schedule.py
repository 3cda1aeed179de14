"""Schedules: which examples are attacked at which iteration, from their step counts.

A ragged schedule is the paper's: iteration t forwards the examples with more than t steps. In a packed schedule
examples with few steps share a place with others, so that all iterations have the same size: the steps of all examples
are concatenated and cut into rows as long as the longest attack (McNaughton's wrap-around rule). No example is in two
places at the same iteration, since none has more steps than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def ragged_sizes(counts: Sequence[int]) -> list[int]:
    """Return the number of examples with more than t steps, for t = 0, 1, … up to the longest attack."""
    most = max(counts, default=0)
    sizes = [0] * most
    for count in counts:
        if count:
            sizes[count - 1] += 1
    for t in range(most - 2, -1, -1):
        sizes[t] += sizes[t + 1]
    return sizes


def ragged(steps: Tensor, counts: Sequence[int]) -> Iterator[Tensor | None]:
    """Yield the rows (n,) of each iteration, those with the most steps first; None: all rows.

    Args:
        steps: (m,) steps of each example.
        counts: the same on the host.
    """
    sizes = ragged_sizes(counts)
    if not sizes or sizes[-1] == len(counts):
        yield from [None] * len(sizes)
        return
    # Stable: examples with equal steps keep their order, as in the plain algorithm.
    order = steps.argsort(descending=True, stable=True)
    for n in sizes:
        yield order[:n]


def packed_sizes(counts: Sequence[int], multiple: int = 1) -> list[int]:
    """Return the number of places at each iteration, rounded up to a multiple, at most the number of examples."""
    total, most = sum(counts), max(counts, default=0)
    # Iteration t takes the positions t, t + most, t + 2·most, … of the line of all steps.
    sizes = [len(range(t, total, most)) for t in range(min(most, total))]
    return [min(round_up(size, multiple), len(counts)) for size in sizes]


def round_up(number: int, multiple: int) -> int:
    """Return the number rounded up to a multiple."""
    return -(-number // multiple) * multiple


def packed(steps: Tensor, most: int, places: int) -> Tensor:
    """Return rows (most, places): the example at each place and iteration; m marks an idle place.

    Args:
        steps: (m,) steps of each example, at most ``most``.
        most: number of iterations.
        places: the first of :func:`packed_sizes`.
    """
    line = torch.arange(places, device=steps.device) * most + torch.arange(most, device=steps.device)[:, None]
    return torch.searchsorted(steps.cumsum(0), line, right=True)
