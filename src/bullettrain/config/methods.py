"""Methods by name: how `--method NAME` changes a recipe, and how reports call a method."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bullettrain import baselines
from bullettrain.allocation import StepBudget
from bullettrain.config.method import OBJECTIVES, ONE_STEP, untaken
from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError, as_setting
from bullettrain.errors import guesses
from bullettrain.validation import instead

REPLAYS = 8
"""Free's m."""


def fast(config: Config, steps: int = 1) -> Config:
    """FAST: one FGSM step of 1.25·eps from a uniform start; fast-N: N steps of 1.7·eps/N."""
    return _with(config, baselines.fast_budget(steps), start=baselines.FAST.start)


def n_fgsm(config: Config) -> Config:
    """N-FGSM: PGD-AT with uniform noise of ±2·eps, one step of eps, no projection."""
    attack = baselines.N_FGSM
    settings = {"start": attack.start, "start_radius": attack.radius, "project": attack.project}
    return _with(config, baselines.ONE_STEP, objective="pgd-at", beta=None, **settings)


def yopo(config: Config, passes: int = 2, updates: int = 5) -> Config:
    """YOPO (yopo-M-N): M full steps, each followed by N updates through the first layer; default 2-5."""
    budget = baselines.yopo_budget(config.method.eps, passes, updates)
    return _with(config, budget, first_layer=updates)


def free(config: Config, replays: int = REPLAYS) -> Config:
    """Free (free-M): PGD-AT that reuses training gradients; M replays of each batch (8), epochs ÷ M."""
    changed = one_step(config, "free")
    epochs = _up(config.training.epochs, replays)
    milestones = tuple(_up(milestone, replays) for milestone in config.schedule.milestones)
    changed = changed.replace_section("schedule", milestones=milestones)
    return changed.replace_section("training", replays=replays, epochs=epochs)


def one_step(config: Config, objective: str) -> Config:
    """Return the config with another objective and one step of eps for all examples."""
    return _with(config, baselines.ONE_STEP, objective=objective, beta=None)


COUNT = r"([1-9]\d*)"
METHODS: dict[str, tuple[str, Callable[..., Config]]] = {
    "fast": (rf"fast(?:-{COUNT})?", fast),
    "n-fgsm": (r"n-fgsm", n_fgsm),
    "yopo": (rf"yopo(?:-{COUNT}-{COUNT})?", yopo),
    **{name: (name, partial(one_step, objective=name)) for name in ONE_STEP},
    "free": (rf"free(?:-{COUNT})?", free),
}
"""By name: the pattern of `--method`, and the function that changes the config."""
EXAMPLES = {"fast": "fast, fast-3", "yopo": "yopo-2-5", "free": f"free-{REPLAYS}"}
"""How names with numbers are written."""


def with_method(config: Config, name: str) -> Config:
    """Return the config with a baseline method, e.g. ``fast``, ``fast-3``, ``n-fgsm``, ``yopo-2-5``, ``gat``.

    Network, data, optimizer and eps stay the same; FAST and YOPO also keep the objective.
    """
    if config.method.objective == "augmix":
        raise ConfigError(f"--method {name}: {config.recipe} is AugMix, which has no attack; choose another recipe")
    for pattern, function in METHODS.values():
        if match := re.fullmatch(pattern, name):
            return function(config, *(int(number) for number in match.groups() if number is not None))
    if objective := next(iter(guesses(name, [known for known in OBJECTIVES if known not in METHODS])), None):
        unsuited = untaken(OBJECTIVES[objective]).items()
        changes = {k: v for k, v in unsuited if k != "beta" and getattr(config.method, k) != v}  # beta follows
        words = " ".join(f"--set {k}={as_setting(v)}" for k, v in {"objective": objective, **changes}.items())
        raise ConfigError(f"{objective!r} is an objective, not a --method; give {words}")
    there = ", ".join(EXAMPLES.get(known, known) for known in METHODS)
    raise ConfigError(f"there is no method {name!r}{instead(name, METHODS, f'there are {there}')}")


def one_line(name: str) -> str:
    """Return the description of a method: the first line of its docstring, or of its objective's module."""
    function = METHODS[name][1]
    text = inspect.getdoc(sys.modules[ONE_STEP[name].__module__] if isinstance(function, partial) else function)
    return (text or "").splitlines()[0]


def _with(config: Config, budget: StepBudget, **settings: Any) -> Config:
    """Return the config with a step budget and ``settings``.

    Other settings of the attack get their defaults, as do those without effect with the objective.
    """
    steps = {key: getattr(budget, key) for key in ("boundary", "robust", "outlier", "step_size", "scale")}
    kind = OBJECTIVES[settings.get("objective", config.method.objective)]
    plain = {"start": None, "start_radius": 1.0, "project": True, "first_layer": 0, "stop_at_success": False}
    changed = config.baseline().replace_section("method", **{**plain, **untaken(kind), **steps, **settings})
    if kind.one_by_one or kind.whole_batch or settings.get("first_layer"):  # they attack one batch at a time
        changed = changed.replace_section("training", attack_group=1)
    return changed


def _up(epochs: int, replays: int) -> int:
    return -(-epochs // replays)


# ------------------------------------------------------------------------------------------ names in reports


def title(objective: str) -> str:
    """Return the name of an objective in reports: "TRADES" for "trades"."""
    kind = OBJECTIVES.get(objective)
    return objective if kind is None else vars(kind).get("title") or kind.__name__


def method_name(method: Mapping[Any, Any]) -> str:
    """Return the name of a section ``method``: TRADES, FAST on TRADES, YOPO-2-5 on TRADES."""
    objective, steps = str(method.get("objective") or ""), method.get("boundary")
    name = title(objective)
    if method.get("first_layer"):
        return f"YOPO-{steps}-{method['first_layer']} on {name}"
    if method.get("project") is False:
        return "N-FGSM" if objective == "pgd-at" else f"N-FGSM on {name}"
    if method.get("start") == "clipped":
        return f"FAST on {name}" if steps == 1 else f"multi-step FAST, N = {steps}, on {name}"
    if objective == "augmix" and method.get("jsd") is False:
        return f"{name} − JSD"
    return name + _allocated(method)


def _allocated(method: Mapping[Any, Any]) -> str:
    """Return the allocation, if it is not the paper's, and what is left out."""
    allocation = method.get("allocation") or "categories"
    parts = [""] if allocation == "categories" else ["", f"allocation {allocation}"]
    parts += ["shuffled"] if method.get("shuffled") else []
    return ", ".join(parts) + left_out(method)


def left_out(method: Mapping[Any, Any]) -> str:
    """Return what a section ``method`` leaves out of its epochs: ", leaving out 0.5 by chance"; empty: nothing."""
    if not method.get("leave_out"):
        return ""
    return f", leaving out {method['leave_out']:g}{' by chance' * (method.get('leave_out_by') == 'chance')}"
