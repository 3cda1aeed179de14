"""How sure an accuracy is, and whether two of them differ."""

from __future__ import annotations

import math

from torch import Tensor

Z95 = 1.959963984540054
"""97.5 % of a standard normal lie below."""


def wilson(correct: float, total: int) -> tuple[float, float]:
    """95 % confidence interval (Wilson's score) of a share of ``correct`` in ``total``; sound near 0 and 1 too."""
    if total < 1:
        raise ValueError("an interval needs at least one example")
    share, z2 = correct / total, Z95 * Z95
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    reach = Z95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def share_error(share: float, total: int) -> float:
    """Standard error of a share of ``total`` examples."""
    return math.sqrt(max(share * (1 - share), 0) / total)


def paired_error(mine: Tensor, other: Tensor) -> float:
    """Standard error of the difference of two shares of the same examples, of which (n,) were right, or how often.

    Examples on which both agree say nothing of it: where ``mine`` alone is right on b and ``other`` alone on c, it is
    √(b + c − (b − c)²/n) / n. Outcomes may be means over several networks.
    """
    apart = mine.double() - other.double()
    n = len(apart)
    return math.sqrt(max(float(apart.square().sum() - apart.sum().square() / n), 0)) / n


def rises(before: Tensor, after: Tensor, *, least: float = 0.005) -> bool:
    """Whether ``after`` (n,) bool is true more often than ``before`` (n,), the same examples, beyond chance.

    McNemar: only examples that changed count, and by chance they change either way equally often. Three
    deviations, since many pairs are looked at, and at least ``least`` of all, since small ones mean little.
    """
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    return gained - lost > max(3 * math.sqrt(gained + lost), least * len(before))
