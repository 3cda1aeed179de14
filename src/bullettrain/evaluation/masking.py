"""Warnings about results: signs of gradient masking, attacks that are too weak, and networks that PGD cannot attack."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from bullettrain.attacks import bare
from bullettrain.attacks.ascent import LogitGradient, Move, WholeNetwork
from bullettrain.evaluation.accuracy import attacked, float32_logits
from bullettrain.evaluation.results import Result, wilson
from bullettrain.evaluation.specs import PGD, radius

UNBOUNDED_LEFT = 0.01
"""Accuracy that an unbounded attack may leave: a few images can be hard to reach in few steps."""
SQUARE_FINDS = 0.01
"""Share of the images that Square may break after the attacks with gradients."""
MIN_STEPS = 10
"""Steps with which an unbounded attack has to break everything."""
LOOKED_AT = 100
"""Number of images whose gradients are looked at before an attack."""


def masking_signs(results: Sequence[Result], *, dimensions: int) -> list[str]:
    """Return a sentence for each sign of gradient masking among results of one network in one precision.

    Args:
        results: results on the same dataset.
        dimensions: number of values in an image, which gives the radius of an unbounded attack.
    """
    signs: list[str] = []
    for group in _groups(results, lambda r: (r.role, r.examples)):
        # An attack whose steps do not reach the edge of the ball is weak for another reason.
        attacks = [r for r in group if r.attack["attack"] == "pgd" and not _shortfall(r)]
        for few, many in _rising(attacks, "steps", ("norm", "eps", "loss")):
            what = "one step breaks more than many" if few.attack["steps"] == 1 else "more steps break less"
            signs.append(f"{what}: {_after(few)}, but {_after(many)} at {_eps(few)}")
        for small, large in _rising(attacks, "eps", ("norm", "steps", "restarts", "loss")):
            both = [f"{_percent(result)} at {_eps(result)}" for result in (small, large)]
            signs.append(f"a larger ε breaks less: {both[0]}, but {both[1]} with {_steps(small)}")
        most = [r for r in attacks if r.attack["eps"] >= unbounded(r.attack["norm"], dimensions)]
        best = min((r for r in most if r.attack["steps"] >= MIN_STEPS), key=lambda r: r.accuracy, default=None)
        if best is not None and wilson(best.correct, best.examples)[0] > UNBOUNDED_LEFT:
            signs.append(f"an attack without bounds leaves {_after(best)}, where it should leave 0 %")
        for result in (r for r in group if "square" in dict(r.rounds)):
            *_, (_, before), (_, after) = result.rounds
            if before - after > SQUARE_FINDS:
                more = f"breaks {100 * (before - after):.1f} % more of the images"
                where = f"after AutoAttack's gradient attacks at {_eps(result)}"
                signs.append(f"Square, which uses no gradients, {more} {where}")
    return [f"{text}; gradients may be masked" for text in dict.fromkeys(signs)]


def too_short(results: Sequence[Result]) -> list[str]:
    """Return a sentence for each PGD attack whose steps together do not reach the edge of the ball."""
    found = [_shortfall(result) for result in results if result.attack["attack"] == "pgd"]
    return [text for text in found if text]


def doubts(model: nn.Module, x: Tensor, y: Tensor, attack: PGD, seed: int) -> list[str]:
    """Return a sentence for each reason why ``attack`` cannot attack images x (m, C, H, W) with labels y (m,).

    Takes the attack's first step. Torch's global generators stay as they are, for networks that are random.
    """
    look, devices = _Look(), [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        attacked(bare(model), x, y, dataclasses.replace(attack, steps=1), seed, ascent=look)
        found = probabilities_note(float32_logits(bare(model), x))
    zero = int((look.gradients.flatten(1) == 0).all(dim=1).sum())
    if 10 * zero >= len(x):
        share = "all" if zero == len(x) else f"at least {10 * (10 * zero // len(x))} % of the"
        why = "PGD cannot attack these, so its accuracy is too high; use AutoAttack, or logits of a normal scale"
        found.append(f"{share} images that were looked at have an input gradient of exactly 0: {why}")
    return found


def probabilities_note(logits: Tensor) -> list[str]:
    """Return a sentence if ``logits`` (m, K), in float32, are probabilities."""
    are = logits.min() > -1e-5 and (logits.sum(dim=1) - 1).abs().max() < 1e-5
    return ["the network returns probabilities, not logits; leave out its last softmax"] if are else []


class _Look(WholeNetwork):
    """The usual step, which stores the gradients (m, C, H, W) that it moves along."""

    gradients: Tensor

    def __call__(self, net: nn.Module, images: Tensor, gradient: LogitGradient, move: Move) -> tuple[Tensor, Tensor]:
        def store(images: Tensor, gradients: Tensor) -> Tensor:
            self.gradients = gradients
            return move(images, gradients)

        return super().__call__(net, images, gradient, store)


def unbounded(norm: str, dimensions: int) -> float:
    """Return the radius at which every image can become any other."""
    return 1.0 if norm == "linf" else float(dimensions) ** 0.5


def rises(before: Tensor, after: Tensor, *, least: float = 0.005) -> bool:
    """Return whether ``after`` (n,) bool is true significantly more often than ``before`` (n,), on the same examples.

    McNemar's test with three standard deviations, since many pairs are tested. A rise has to be at least ``least``.
    """
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    return gained - lost > max(3 * math.sqrt(gained + lost), least * len(before))


def _rising(attacks: Sequence[Result], by: str, alike: Sequence[str]) -> Iterator[tuple[Result, Result]]:
    """Yield pairs (weak, strong) of attacks whose accuracy rises although the setting ``by`` is larger.

    Pairs agree in the settings ``alike``, and the stronger has no fewer restarts. Only the largest rise of each group
    is yielded.
    """
    for group in _groups(attacks, lambda r: [r.attack[key] for key in alike]):
        pairs = [
            (weak, strong)
            for weak, strong in permutations(group, 2)
            if weak.attack[by] < strong.attack[by] and weak.attack["restarts"] <= strong.attack["restarts"]
        ]
        rising = [pair for pair in pairs if rises(pair[0].mask, pair[1].mask)]
        if rising:
            yield max(rising, key=lambda pair: pair[1].accuracy - pair[0].accuracy)


def _groups(results: Sequence[Result], by: Callable[[Result], Iterable[Any]]) -> list[list[Result]]:
    groups: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    for result in results:
        groups[tuple(by(result))].append(result)
    return list(groups.values())


def _shortfall(result: Result) -> str:
    return PGD(**{key: value for key, value in result.attack.items() if key != "attack"}).shortfall


def _percent(result: Result) -> str:
    return f"{100 * result.accuracy:.1f} %"


def _after(result: Result) -> str:
    return f"{_percent(result)} after {_steps(result)}"


def _steps(result: Result) -> str:
    steps, restarts = result.attack["steps"], result.attack["restarts"]
    return f"{steps} step{'s' * (steps > 1)}" + (f" × {restarts} restarts" if restarts > 1 else "")


def _eps(result: Result) -> str:
    return f"ε = {radius(result.attack['eps'])}"
