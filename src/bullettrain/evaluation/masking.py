"""Signs of gradient masking, numbers that a really robust network does not give; and attacks that are too weak."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Any

from bullettrain.evaluation.results import Result
from bullettrain.evaluation.specs import radius
from bullettrain.evaluation.statistics import rises, wilson

UNBOUNDED_LEFT = 0.01
"""Accuracy that an attack without bounds may leave: a few images can be hard to reach in few steps."""
SQUARE_FINDS = 0.01
"""Share of the images that a search without gradients may break after attacks with gradients."""
MIN_STEPS = 10
"""Steps with which an attack without bounds has to break everything."""


def masking_signs(results: Sequence[Result], *, dimensions: int) -> list[str]:
    """A sentence for each sign among results of one network, on the same images, in one precision.

    ``dimensions``: numbers in an image, for the radius beyond which nothing is out of reach.
    """
    found: list[str] = []
    for group in _groups(results, lambda r: (r.role, r.examples)):
        # An attack whose steps do not reach the edge of its ball may well be the weaker for it.
        attacks = [r for r in group if r.attack["attack"] == "pgd" and _reaches_edge(r)]
        for few, many in _rising(attacks, ("norm", "eps", "loss"), _has_more_steps):
            what = "one step breaks more than many" if few.attack["steps"] == 1 else "more steps break less"
            found.append(
                f"{what}: {_left(few)} after {_steps(few)}, but {_left(many)} after {_steps(many)} at {_eps(few)}"
            )
        for small, large in _rising(attacks, ("norm", "steps", "restarts", "loss"), _has_larger_eps):
            found.append(
                f"a larger ε breaks less: {_left(small)} at {_eps(small)}, but {_left(large)} at {_eps(large)} "
                f"with {_steps(small)}"
            )
        found += _unbounded(attacks, dimensions)
        found += [text for r in group if r.attack["attack"] == "autoattack" for text in _without_gradients(r)]
    return [f"{text}; gradients may be masked" for text in dict.fromkeys(found)]


def too_short(results: Sequence[Result]) -> list[str]:
    """A sentence for each PGD whose steps together are shorter than the way to the edge of the ball."""
    return [
        f"{result.name} moves by {result.attack['steps']} × {result.attack['step']:g} at most, less than "
        f"{_eps(result)}: it is weaker than it sounds; give it a larger step"
        for result in results
        if result.attack["attack"] == "pgd" and not _reaches_edge(result)
    ]


def unbounded(norm: str, dimensions: int) -> float:
    """The radius at which every image is within reach of every other."""
    return 1.0 if norm == "linf" else float(dimensions) ** 0.5


def _rising(
    attacks: Sequence[Result], alike: Sequence[str], stronger: Callable[[Result, Result], bool]
) -> Iterator[tuple[Result, Result]]:
    """Among attacks ``alike`` in these settings, the two with the largest rise from a weaker to a stronger attack."""
    for group in _groups(attacks, lambda r: tuple(r.attack[key] for key in alike)):
        pairs = [pair for pair in permutations(group, 2) if stronger(*pair) and rises(pair[0].mask, pair[1].mask)]
        if pairs:
            yield max(pairs, key=lambda pair: pair[1].accuracy - pair[0].accuracy)


def _has_more_steps(few: Result, many: Result) -> bool:
    """More steps, and no fewer restarts: then it ought to break at least as much."""
    return bool(few.attack["steps"] < many.attack["steps"] and few.attack["restarts"] <= many.attack["restarts"])


def _has_larger_eps(small: Result, large: Result) -> bool:
    return bool(small.attack["eps"] < large.attack["eps"])


def _unbounded(attacks: Sequence[Result], dimensions: int) -> list[str]:
    """An attack that may change everything has to break everything."""
    free = [
        r
        for r in attacks
        if r.attack["eps"] >= unbounded(r.attack["norm"], dimensions) and r.attack["steps"] >= MIN_STEPS
    ]
    best = min(free, key=lambda r: r.accuracy, default=None)
    if best is None or wilson(best.correct, best.examples)[0] <= UNBOUNDED_LEFT:
        return []
    return [f"an attack without bounds leaves {_left(best)} after {_steps(best)}, where it should leave 0 %"]


def _without_gradients(result: Result) -> list[str]:
    """Square uses no gradient and comes last: what it still finds, gradients did not show."""
    shares = dict(result.rounds)
    found = min((share for name, share in shares.items() if name != "square"), default=0.0) - shares.get("square", 1.0)
    if found <= SQUARE_FINDS:
        return []
    more = f"breaks {100 * found:.1f} % more of the images"
    return [f"Square, which uses no gradients, {more} after AutoAttack's gradient attacks at {_eps(result)}"]


def _groups(results: Sequence[Result], by: Callable[[Result], Any]) -> list[list[Result]]:
    groups: dict[Any, list[Result]] = {}
    for result in results:
        groups.setdefault(by(result), []).append(result)
    return list(groups.values())


def _reaches_edge(result: Result) -> bool:
    return bool(result.attack["steps"] * result.attack["step"] >= result.attack["eps"] * (1 - 1e-9))


def _left(result: Result) -> str:
    return f"{100 * result.accuracy:.1f} %"


def _steps(result: Result) -> str:
    steps, restarts = result.attack["steps"], result.attack["restarts"]
    return f"{steps} step{'s' * (steps > 1)}" + (f" × {restarts} restarts" if restarts > 1 else "")


def _eps(result: Result) -> str:
    return f"ε = {radius(result.attack['eps'])}"
