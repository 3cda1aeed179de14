"""Parse attacks from text: `pgd20`, `pgd100x10`, `pgd:steps=50,eps=8/255`, `autoattack`."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bullettrain.attacks.norms import USUAL_EPS, Ball
from bullettrain.config.sections import Config, EvaluationConfig
from bullettrain.config.settings import ConfigError, limits_of, parse
from bullettrain.errors import raised_as
from bullettrain.validation import check_number, instead

PAPER_STEP = 0.003
"""Step size of the paper's PGD-20 at ε = 0.031."""
KNOWN_ATTACKS = (
    "clean, pgd20, pgd100x10, pgd1000x5 (any pgdSTEPSxRESTARTS), "
    "pgd:steps=…,restarts=…,step=…,loss=ce|kl|margin,norm=linf|l2,eps=8/255, "
    "autoattack, autoattack:norm=linf|l2,eps=…, apgd (the first two attacks of autoattack), corruptions"
)

NormName = Literal["linf", "l2"]


@dataclass(frozen=True)
class AttackSpec:
    """Base class of attacks on images before they are classified."""

    @property
    def name(self) -> str:
        """Short name, without ε, norm and step size."""
        return type(self).__name__.lower()


class Clean(AttackSpec):
    """No attack."""


class Corruptions(AttackSpec):
    """Common corruptions, from a folder."""


@dataclass(frozen=True)
class PGD(AttackSpec):
    """Projected gradient ascent from uniform random starts; the worst restart counts for each image.

    The defaults are the paper's PGD-20.

    Args:
        steps: number of steps.
        restarts: number of random starts.
        step: step size.
        loss: "ce", "kl" or "margin".
        norm: "linf" or "l2".
        eps: radius of the ball.
    """

    steps: int = 20
    restarts: int = 1
    step: float = PAPER_STEP
    loss: Literal["ce", "kl", "margin"] = "ce"
    norm: NormName = "linf"
    eps: float = USUAL_EPS["linf"]

    @property
    def name(self) -> str:
        """`pgd20`, `pgd100x10`, `pgd20-kl`."""
        times = f"x{self.restarts}" if self.restarts > 1 else ""
        return f"pgd{self.steps}{times}" + (f"-{self.loss}" if self.loss != "ce" else "")

    @property
    def shortfall(self) -> str:
        """A warning if the steps together do not reach the edge of the ball, else ""."""
        if self.steps * self.step >= self.eps * (1 - 1e-9):
            return ""
        return (
            f"{self.name} moves by {self.steps} × {self.step:g} at most, less than ε = {radius(self.eps)}: "
            "it is weaker than it sounds; give it a larger step"
        )


@dataclass(frozen=True)
class AutoAttack(AttackSpec):
    """The standard version: APGD on cross-entropy, targeted APGD, targeted FAB, Square."""

    norm: NormName
    eps: float


class APGD(AutoAttack):
    """The first two attacks of AutoAttack, which break nearly as many images as all four."""


KINDS: dict[str, type[AttackSpec]] = {
    kind.__name__.lower(): kind for kind in (Clean, PGD, AutoAttack, APGD, Corruptions)
}


@dataclass(frozen=True)
class Defaults:
    """Default settings of attacks: those of the run, or the paper's without a run."""

    norm: NormName = "linf"
    eps: float | None = None
    """None: 0.031 in L∞, 0.5 in L2."""
    step: float | None = None
    """Step size of attacks at ``eps`` with at least ``steps`` steps; None: see :meth:`step_size`."""
    steps: int = 20

    def radius(self, norm: NormName) -> float:
        """Return ``eps`` if it is in this norm, else the usual ε."""
        return self.eps if self.eps is not None and norm == self.norm else USUAL_EPS[norm]

    def step_size(self, steps: int, norm: NormName, eps: float) -> float:
        """Return the run's or the paper's step size if it applies; else ε/10, or more for fewer than 20 steps."""
        if self.step is not None and (norm, eps) == (self.norm, self.eps) and steps >= self.steps:
            return self.step
        if steps < 20:
            return few_steps(steps, eps)
        return PAPER_STEP if (norm, eps) == ("linf", USUAL_EPS["linf"]) else eps / 10

    def is_usual(self, attack: Mapping[str, Any]) -> bool:
        """Return whether an attack, as :func:`as_dict` has it, has the default step size: its name does not tell."""
        if attack["attack"] != "pgd":
            return True
        return math.isclose(attack["step"], self.step_size(attack["steps"], attack["norm"], attack["eps"]))


def threat_of(config: Config) -> Defaults:
    """Return the default settings of attacks on a run. AugMix has no threat model, so its runs get the paper's."""
    method, evaluation = config.method, config.evaluation
    if method.objective == "augmix":
        return Defaults()
    return Defaults(method.norm, method.eps, evaluation.step_size, evaluation.steps)


def few_steps(steps: int, eps: float) -> float:
    """Return 2.5·ε/steps, which is enough to cross the ball; for one step 1.25·ε, as in FGSM."""
    return min(2.5 / max(steps, 1), 1.25) * eps


def parse_attacks(texts: Sequence[str], defaults: Defaults | None = None) -> list[AttackSpec]:
    """Parse attacks, each once, in order. Commas separate several: `clean,pgd20,pgd:steps=50,restarts=2` is three."""
    words: list[str] = []
    for part in ",".join(texts).split(","):
        if "=" in part and ":" not in part and words:
            words[-1] += f",{part}"  # another parameter of the attack before
        elif part.strip():
            words.append(part.strip())
    return list(dict.fromkeys(parse_attack(word, defaults or Defaults()) for word in words))


def parse_attack(text: str, defaults: Defaults) -> AttackSpec:
    """Parse one attack. Case, hyphens and underscores in its name do not count: `PGD-20` is `pgd20`.

    Raises:
        ConfigError: the attack or a parameter is unknown, or a value is not valid.
    """
    given, colon, rest = text.strip().partition(":")
    name, where = re.sub(r"[-_ ]", "", given).lower(), f"--attack {text}: "
    short = re.fullmatch(r"pgd(\d+)(?:x(\d+))?", name)
    kind = PGD if short else KINDS.get(name)
    hints = typing.get_type_hints(kind) if kind else {}
    if kind is None or (colon and not hints):
        numbers = re.search(r"\d+(x\d+)?", name)
        known = [*KINDS, *([f"pgd{numbers[0]}"] if numbers else [])]
        raise ConfigError(f"there is no attack {text!r}{instead(name, known, f'there are {KNOWN_ATTACKS}')}")
    if colon and not rest:
        raise ConfigError(f"{where}write pgd:steps=20,eps=8/255, or {name} without a colon")
    words = {"steps": short[1], "restarts": short[2] or "1"} if short else {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or key not in hints:
            what = f"there is no parameter {key!r}" if equals else f"{part!r} is no parameter"
            raise ConfigError(f"{where}{what}{instead(key, hints)}")
        if key in words:
            raise ConfigError(f"{where}{key} is given twice")
        words[key] = value
    values: dict[str, Any] = {key: parse(value, hints[key], f"{where}{key}") for key, value in words.items()}
    if hints:
        norm = values.setdefault("norm", defaults.norm)
        eps = values.setdefault("eps", defaults.radius(norm))
        ball = check_ball(norm, eps, where)
    if kind is PGD:
        steps = values.setdefault("steps", 20)
        values = {"restarts": 1, "loss": "ce", "step": defaults.step_size(steps, norm, eps), **values}
        for key, setting in (("steps", "steps"), ("restarts", "restarts"), ("step", "step_size")):
            limits = limits_of(EvaluationConfig, setting)
            check_number(values[key], f"{where}{key}", error=ConfigError, **limits)
        with raised_as(ConfigError, f"{where}{{error}}", ValueError):
            ball.check_step(values["step"], "step")
    return kind(**values)


def check_ball(norm: str, eps: float, where: str) -> Ball:
    """Return the ball. Raises ConfigError, which starts with ``where``, if ``eps`` is no radius in ``norm``."""
    with raised_as(ConfigError, f"{where}{{error}}", ValueError):
        return Ball.of(norm, eps)


def as_dict(attack: AttackSpec) -> dict[str, Any]:
    """Return the kind and all settings of the attack, for a record."""
    return {"attack": type(attack).__name__.lower(), **dataclasses.asdict(attack)}


def threat_in_words(norm: str, eps: float) -> str:
    """Format a threat model: `L∞ 8/255`."""
    return f"{'L∞' if norm == 'linf' else 'L2'} {radius(eps)}"


def radius(eps: float) -> str:
    """Format ε: 0.3, or 8/255 where that is shorter."""
    of_255 = eps * 255
    if float(f"{eps:.3g}") != eps and round(of_255) and abs(of_255 - round(of_255)) < 1e-6:
        return f"{round(of_255)}/255"
    return f"{eps:.4g}"
