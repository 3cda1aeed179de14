"""Rows of results/plane.csv as benchmarks/rows.py names them: their commands, and the folders of their survivors."""

import re

RECIPES = {"PGD-AT": "cifar10-pgd-short", "TRADES": "cifar10-trades-short", "MART": "cifar10-mart-short"}
ALLOCATIONS = ("gaussian", "history", "early-stop", "radius", "second-step")
CHOSEN_BY = {"chance": "score=random", "oracle": "separation=oracle"}
WORDS = {**CHOSEN_BY, "shuffled": "shuffled=true", **{name: f"allocation={name}" for name in ALLOCATIONS}}
"""Options of a row that stand for a setting."""
COUNTS = ("boundary", "robust", "outlier")
ORDINARY = {"eps=8/255", "attack_group=4", "evaluation.search=bf16", "ordered=false"}
"""Settings that do not tell rows apart."""


def command(row: str) -> list[str]:
    """Return the ``train`` command of a row."""
    objective, steps, *options = row.split()
    seeds = [option.removeprefix("seed=") for option in options if option.startswith("seed=")]
    counts = [f"{key}={n}" for key, n in zip(COUNTS, steps.split("/"), strict=True)]
    settings = ["eps=8/255", *counts, "attack_group=4", "evaluation.search=bf16"]
    numbers = [int(n) for n in steps.split("/")]
    settings += ["ordered=false"] if numbers != sorted(numbers, reverse=True) else []
    settings += [WORDS.get(option, option) for option in options if not option.startswith("seed=")]
    words = ["train", RECIPES[objective], "--compile", "--seed", *(seeds or ["0"])]
    return words + [word for setting in settings for word in ("--set", setting)] + ["--keep-going"]


def options_of(command: str) -> list[str]:
    """Return the options of a row in which its command differs from that of its objective, steps and seed."""
    option_of = {setting: option for option, setting in WORDS.items()}
    settings = re.findall(r"--set (\S+)", command)
    further = [setting for setting in settings if setting not in ORDINARY and setting.split("=")[0] not in COUNTS]
    return [option_of.get(setting, setting) for setting in further]


def folder_name(command: str) -> str:
    """Return the name of a row's folder: 3-1-1, 3-1-1-chance-seed-1, trades-3-3-3."""
    objective = next(name for name, recipe in RECIPES.items() if f" {recipe} " in f" {command} ")
    seed = re.search(r"--seed (\d+)", command)
    parts = [] if objective == "PGD-AT" else [objective.lower()]
    parts += re.findall(rf"--set (?:{'|'.join(COUNTS)})=(\d+)", command)
    parts += [option.replace("=", "-") for option in options_of(command)]
    parts += ["seed", seed[1]] if seed and seed[1] != "0" else []
    return "-".join(parts)
