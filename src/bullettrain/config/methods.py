"""Baselines as settings: how `--method NAME` changes a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from bullettrain import baselines
from bullettrain.allocation import StepBudget
from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError
from bullettrain.validation import instead

ALIGN, REPLAYS = 0.2, 8
"""GradAlign's λ, as published for eps = 8/255, and Free's m."""
AT_ONCE = {"clean_warmup": 0.0, "selection": None}
"""Objectives with an attack of their own attack from the first step on, and select no examples."""


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


def grad_align(config: Config) -> Config:
    """GradAlign: PGD-AT with one FGSM step of eps, and a term that aligns input gradients."""
    return _with(config, baselines.ONE_STEP, objective="pgd-at", beta=None, align=ALIGN)


def free(config: Config, replays: int = REPLAYS) -> Config:
    """Free (free-M): PGD-AT that reuses training gradients; M replays of each batch (8), epochs ÷ M."""
    changed = _with(config, baselines.ONE_STEP, objective="pgd-at", beta=None, carry=True)
    epochs = _up(config.training.epochs, replays)
    milestones = tuple(_up(milestone, replays) for milestone in config.schedule.milestones)
    changed = changed.replace_section("schedule", milestones=milestones)
    return changed.replace_section("training", replays=replays, epochs=epochs)


def gat(config: Config) -> Config:
    """GAT: one step from random ±eps/2 noise, and a term that keeps clean and attacked softmax close."""
    return _with(config, baselines.ONE_STEP, objective="gat", beta=None, **AT_ONCE)


def nuat(config: Config) -> Config:
    """NuAT: like GAT, with the nuclear norm of the change of a batch's logits."""
    return _with(config, baselines.ONE_STEP, objective="nuat", beta=None, **AT_ONCE)


def fgsm_pgi(config: Config) -> Config:
    """FGSM-PGI: one step from the last epoch's perturbation, and a term that keeps both outputs close."""
    return _with(config, baselines.ONE_STEP, objective="fgsm-pgi", beta=None, **AT_ONCE, eps_warmup=0.0)


COUNT = r"([1-9]\d*)"
METHODS: dict[str, tuple[str, Callable[..., Config]]] = {
    "fast": (rf"fast(?:-{COUNT})?", fast),
    "n-fgsm": (r"n-fgsm", n_fgsm),
    "yopo": (rf"yopo(?:-{COUNT}-{COUNT})?", yopo),
    "grad-align": (r"grad-align", grad_align),
    "free": (rf"free(?:-{COUNT})?", free),
    "gat": (r"gat", gat),
    "nuat": (r"nuat", nuat),
    "fgsm-pgi": (r"fgsm-pgi", fgsm_pgi),
}
"""By name: the pattern of `--method`, and the function that changes the config."""


def with_method(config: Config, name: str) -> Config:
    """Return the config with a baseline method, e.g. ``fast``, ``fast-3``, ``n-fgsm``, ``yopo-2-5``, ``gat``.

    Network, data, optimizer and eps stay the same; FAST and YOPO also keep the objective.
    """
    if config.method.objective == "augmix":
        raise ConfigError(f"--method {name}: {config.recipe} is AugMix, which has no attack; choose another recipe")
    for pattern, function in METHODS.values():
        if match := re.fullmatch(pattern, name):
            return function(config, *(int(number) for number in match.groups() if number is not None))
    there = "there are fast, fast-3, n-fgsm, yopo-2-5, grad-align, free-8, gat, nuat, fgsm-pgi"
    raise ConfigError(f"there is no method {name!r}{instead(name, METHODS, there)}")


def one_line(name: str) -> str:
    """Return the description of a method."""
    return (METHODS[name][1].__doc__ or "").strip().splitlines()[0]


def _with(config: Config, budget: StepBudget, **settings: Any) -> Config:
    """Return the config with a step budget and attack ``settings``; other attack settings get their defaults."""
    steps = {key: getattr(budget, key) for key in ("boundary", "robust", "outlier", "step_size", "scale")}
    plain = {"start": None, "start_radius": 1.0, "project": True, "first_layer": 0, "align": 0.0, "carry": False}
    plain["stop_at_success"] = False
    changed = config.baseline().replace_section("method", **{**plain, **steps, **settings})
    ungrouped = any(settings.get(key) for key in ("first_layer", "align", "carry"))
    if ungrouped or settings.get("objective") == "nuat":  # they attack one batch at a time
        changed = changed.replace_section("training", attack_group=1)
    return changed


def _up(epochs: int, replays: int) -> int:
    return -(-epochs // replays)
