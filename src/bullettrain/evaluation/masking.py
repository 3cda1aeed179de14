"""Signs of gradient masking, numbers that a really robust network does not give; and attacks that are too weak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from bullettrain.evaluation.results import Result
from bullettrain.evaluation.specs import radius
from bullettrain.evaluation.statistics import rises, wilson

UNBOUNDED_LEFT = 0.01
"""Accuracy that an attack without bounds may leave: a few images can be hard to reach in few steps."""
SQUARE_FINDS = 0.01
"""Share of the images that a search without gradients may break after attacks with gradients."""


def masking_signs(results: Sequence[Result], *, dimensions: int) -> list[str]:
    """A sentence for each sign among results of one network, on the same images, in one precision.

    ``dimensions``: numbers in an image, for the radius beyond which nothing is out of reach.
    """
    found: list[str] = []
    for group in _groups(results, lambda r: (r.role, r.examples)):
        attacks = [r for r in group if r.attack["attack"] == "pgd" and _reaches(r)]
        found += _more_steps(attacks)
        found += _larger_eps(attacks)
        found += _unbounded(attacks, dimensions)
        found += [text for r in group if r.attack["attack"] == "autoattack" for text in _without_gradients(r)]
    return list(dict.fromkeys(found))


def too_short(results: Sequence[Result]) -> list[str]:
    """A sentence for each PGD whose steps together are shorter than the way to the edge of the ball."""
    return [
        f"{result.name} moves by {result.attack['steps']} × {result.attack['step']:g} at most, less than "
        f"{_radius(result)}: it is weaker than it sounds; give it a larger step"
        for result in results
        if result.attack["attack"] == "pgd" and not _reaches(result)
    ]


def unbounded(norm: str, dimensions: int) -> float:
    """The radius at which every image is within reach of every other."""
    return 1.0 if norm == "linf" else float(dimensions) ** 0.5


def _more_steps(attacks: Sequence[Result]) -> list[str]:
    """Robust accuracy that rises with more steps; one step stronger than many."""
    texts = []
    for group in _groups(attacks, lambda r: (r.attack["norm"], r.attack["eps"], r.attack["loss"])):
        ordered = sorted(group, key=lambda r: (r.attack["steps"], r.attack["restarts"]))
        pairs = [(few, many) for few, many in combinations(ordered, 2) if _is_more(few, many)]
        worst = max((pair for pair in pairs if rises(pair[0].mask, pair[1].mask)), key=_rise, default=None)
        if worst is None:
            continue
        few, many = worst
        what = "one step breaks more than many" if few.attack["steps"] == 1 else "more steps break less"
        texts.append(
            f"{what}: {_percent(few)} after {_steps(few)}, but {_percent(many)} after {_steps(many)} "
            f"at {_radius(few)}; gradients may be masked"
        )
    return texts


def _larger_eps(attacks: Sequence[Result]) -> list[str]:
    """Robust accuracy that rises with ε."""
    texts = []
    for group in _groups(attacks, lambda r: (r.attack["norm"], r.attack["steps"], r.attack["restarts"], _loss(r))):
        ordered = sorted(group, key=lambda r: float(r.attack["eps"]))
        pairs = [(a, b) for a, b in combinations(ordered, 2) if a.attack["eps"] < b.attack["eps"]]
        worst = max((pair for pair in pairs if rises(pair[0].mask, pair[1].mask)), key=_rise, default=None)
        if worst is not None:
            small, large = worst
            texts.append(
                f"a larger ε breaks less: {_percent(small)} at {_radius(small)}, but {_percent(large)} at "
                f"{_radius(large)} with {_steps(small)}; gradients may be masked"
            )
    return texts


def _unbounded(attacks: Sequence[Result], dimensions: int) -> list[str]:
    """An attack that may change everything has to break everything."""
    free = [r for r in attacks if r.attack["eps"] >= unbounded(r.attack["norm"], dimensions) and _enough(r)]
    if not free:
        return []
    best = min(free, key=lambda r: r.accuracy)
    if wilson(best.correct, best.examples)[0] <= UNBOUNDED_LEFT:
        return []
    return [
        f"an attack without bounds leaves {_percent(best)} after {_steps(best)}, where it should leave 0 %; "
        "gradients may be masked"
    ]


def _without_gradients(result: Result) -> list[str]:
    """Square uses no gradient and comes last: what it still finds, gradients did not show."""
    shares = dict(result.rounds)
    before = min((share for name, share in result.rounds if name != "square"), default=None)
    if before is None or "square" not in shares or before - shares["square"] <= SQUARE_FINDS:
        return []
    return [
        f"Square, which uses no gradients, breaks {100 * (before - shares['square']):.1f} % more of the images "
        f"after AutoAttack's gradient attacks at {_radius(result)}; gradients may be masked"
    ]


def _groups(results: Sequence[Result], by: Callable[[Result], Any]) -> list[list[Result]]:
    groups: dict[Any, list[Result]] = {}
    for result in results:
        groups.setdefault(by(result), []).append(result)
    return list(groups.values())


def _is_more(few: Result, many: Result) -> bool:
    """More steps, and no fewer restarts: then it ought to break at least as much."""
    return bool(few.attack["steps"] < many.attack["steps"] and few.attack["restarts"] <= many.attack["restarts"])


def _reaches(result: Result) -> bool:
    """Whether the steps together go as far as the edge; an attack that does not may well be the weaker for it."""
    return bool(result.attack["steps"] * result.attack["step"] >= result.attack["eps"] * (1 - 1e-9))


def _enough(result: Result) -> bool:
    return bool(result.attack["steps"] >= 10)


def _rise(pair: tuple[Result, Result]) -> float:
    return pair[1].accuracy - pair[0].accuracy


def _loss(result: Result) -> str:
    return str(result.attack["loss"])


def _percent(result: Result) -> str:
    return f"{100 * result.accuracy:.1f} %"


def _steps(result: Result) -> str:
    steps, restarts = result.attack["steps"], result.attack["restarts"]
    return f"{steps} step{'s' * (steps > 1)}" + (f" × {restarts} restarts" if restarts > 1 else "")


def _radius(result: Result) -> str:
    return f"ε = {radius(result.attack['eps'])}"
