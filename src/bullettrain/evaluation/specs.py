"""Attacks as text: `pgd20`, `pgd100x10`, `pgd:steps=50,eps=8/255`, `autoattack`, and what they mean."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from bullettrain.attacks.norms import USUAL_EPS
from bullettrain.config.sections import Config, EvaluationConfig
from bullettrain.config.settings import ConfigError, limits_of, parse
from bullettrain.validation import instead

PAPER_STEP = 0.003
"""Step size of the paper's PGD-20, at its eps."""
MENU = (
    "clean, pgd20, pgd100x10, pgd1000x5 (any pgdSTEPSxRESTARTS), "
    "pgd:steps=…,restarts=…,step=…,loss=ce|kl|margin,norm=linf|l2,eps=8/255, "
    "autoattack, autoattack:norm=linf|l2,eps=…, apgd (the first two attacks of autoattack), corruptions"
)

NormName = Literal["linf", "l2"]


@dataclass(frozen=True)
class Attack:
    """What is done to the images before they are classified."""

    @property
    def name(self) -> str:
        """As it is typed, in short; ε, norm and step are told beside it."""
        return type(self).__name__.lower()


class Clean(Attack):
    """The images as they are."""


class Corruptions(Attack):
    """A folder of common corruptions."""


@dataclass(frozen=True)
class PGD(Attack):
    """Projected gradient ascent from uniform starts; the worst of the restarts counts."""

    steps: int
    restarts: int
    step: float
    loss: Literal["ce", "kl", "margin"]
    norm: NormName
    eps: float

    @property
    def name(self) -> str:
        """`pgd20`, `pgd100x10`, `pgd20-kl`."""
        times = f"x{self.restarts}" if self.restarts > 1 else ""
        return f"pgd{self.steps}{times}" + (f"-{self.loss}" if self.loss != "ce" else "")


@dataclass(frozen=True)
class AutoAttack(Attack):
    """The standard ensemble: APGD on cross-entropy, targeted APGD and FAB, Square."""

    norm: NormName
    eps: float


class APGD(AutoAttack):
    """The first half of the ensemble, which breaks nearly all that the whole does: APGD on cross-entropy, targeted."""


KINDS: dict[str, type[Attack]] = {kind.__name__.lower(): kind for kind in (Clean, PGD, AutoAttack, APGD, Corruptions)}


@dataclass(frozen=True)
class Defaults:
    """Settings of attacks that do not give them: the run's own ε, norm and step, the paper's where there is no run."""

    norm: NormName = "linf"
    eps: float | None = None
    """None: 0.031 in L∞, 0.5 in L2."""
    step: float | None = None
    """Of attacks at ``eps`` with at least ``steps`` steps; None: see :meth:`step_size`."""
    steps: int = 20

    def radius(self, norm: NormName) -> float:
        """ε in ``norm``: the default's own where it is that norm, else what is usual."""
        return self.eps if self.eps is not None and norm == self.norm else USUAL_EPS[norm]

    def step_size(self, steps: int, norm: NormName, eps: float) -> float:
        """The run's, or the paper's at its ε; else ε/10, and more where so few steps would not cross the ball."""
        if self.step is not None and (norm, eps) == (self.norm, self.eps) and steps >= self.steps:
            return self.step
        if steps < 20:
            return few_steps(steps, eps)
        return PAPER_STEP if (norm, eps) == ("linf", USUAL_EPS["linf"]) else eps / 10


def threat_of(config: Config) -> Defaults:
    """The defaults of attacks on a run; AugMix has no threat model: its runs are evaluated as if there were no run."""
    method, evaluation = config.method, config.evaluation
    if method.objective == "augmix":
        return Defaults()
    return Defaults(cast(NormName, method.norm), method.eps, evaluation.step_size, evaluation.steps)


def few_steps(steps: int, eps: float) -> float:
    """2.5·ε/steps: room to go from any start to any place in the ball; one step is FGSM's 1.25·ε."""
    return min(2.5 / max(steps, 1), 1.25) * eps


def parse_attacks(texts: Sequence[str], defaults: Defaults | None = None) -> list[Attack]:
    """The attacks that are asked for, each once, in order.

    ``texts`` may each hold several between commas: `clean,pgd20,pgd:steps=50,restarts=2` is three.
    """
    words: list[str] = []
    for part in ",".join(texts).split(","):
        if "=" in part and ":" not in part and words:
            words[-1] += f",{part}"  # one more parameter of the attack before
        elif part.strip():
            words.append(part.strip())
    return list(dict.fromkeys(parse_attack(word, defaults or Defaults()) for word in words))


def parse_attack(text: str, defaults: Defaults) -> Attack:
    """One attack.

    Raises:
        ConfigError: there is no such attack, or a parameter is wrong; it says what there is.
    """
    name, colon, rest = text.strip().partition(":")
    short = re.fullmatch(r"pgd(\d+)(?:x(\d+))?", name)
    kind = PGD if short else KINDS.get(name)
    hints = typing.get_type_hints(kind) if kind else {}
    if kind is None or (colon and not hints):
        raise ConfigError(f"there is no attack {text!r}; there are {MENU}")
    if colon and not rest:
        raise ConfigError(f"--attack {text}: write pgd:steps=20,eps=8/255, or {name} without a colon")
    words = {"steps": short[1], "restarts": short[2] or "1"} if short else {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or key not in hints:
            what = f"there is no parameter {key!r}" if equals else f"{part!r} is no parameter"
            raise ConfigError(f"--attack {text}: {what}{instead(key, hints)}")
        if key in words:
            raise ConfigError(f"--attack {text}: {key} is given twice")
        words[key] = value
    given: dict[str, Any] = {key: parse(value, hints[key], f"--attack {text}: {key}") for key, value in words.items()}
    if hints:
        norm = given.setdefault("norm", defaults.norm)
        eps = check_eps(given.setdefault("eps", defaults.radius(norm)), norm, f"--attack {text}: ")
    if kind is PGD:
        steps = given.setdefault("steps", 20)
        given = {"restarts": 1, "loss": "ce", "step": defaults.step_size(steps, norm, eps), **given}
        for key, setting in (("steps", "steps"), ("restarts", "restarts"), ("step", "step_size")):
            low, high = limits_of(EvaluationConfig, setting)
            if not low <= given[key] <= high:
                limits = f"it has to be at least {low:g} and at most {high:g}"
                raise ConfigError(f"--attack {text}: {key} is {given[key]}; {limits}")
    return kind(**given)


def check_eps(eps: float, norm: str, where: str) -> float:
    """``eps``, if it is a radius in ``norm``; ``where`` it stands, for the message."""
    if not 0 < eps < float("inf"):
        raise ConfigError(f"{where}eps is {eps:g}; it has to be a number above 0")
    if norm == "linf" and eps > 1:
        raise ConfigError(f"{where}eps is {eps:g}, but pixels are in [0, 1]; did you mean {eps:g}/255?")
    return eps


def as_dict(attack: Attack) -> dict[str, Any]:
    """All that determines the attack, for a record."""
    return {"attack": type(attack).__name__.lower(), **dataclasses.asdict(attack)}


def threat_in_words(norm: str, eps: float) -> str:
    """`L∞ 8/255`."""
    return f"{'L∞' if norm == 'linf' else 'L2'} {radius(eps)}"


def radius(eps: float) -> str:
    """ε as a person writes it: 0.3, or 8/255 where that is shorter than the number."""
    of_255 = eps * 255
    if float(f"{eps:.3g}") != eps and round(of_255) and abs(of_255 - round(of_255)) < 1e-6:
        return f"{round(of_255)}/255"
    return f"{eps:.4g}"
