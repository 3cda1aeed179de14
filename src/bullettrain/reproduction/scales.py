"""Scales of a reproduction, from seconds on a CPU to the paper's own schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Recipe = tuple[str, tuple[str, ...]]
"""The name of a recipe, and changes as `--set` takes them."""


@dataclass(frozen=True)
class Scale:
    """The settings of a reproduction.

    Args:
        name: name for `--scale`.
        about: description.
        recipes: recipes by family: trades, mart, augmix10, augmix100, and mnist with its two other starts.
        grid: step counts of the MNIST study.
        gammas: values of γ in its sweep.
        robust_steps: values of N_R in its sweep.
        attacks: replacements for attacks of the paper.
        images: number of test images for attacks after training; 0 for all.
        like_paper: whether figures can be compared with the paper's, and runs get a report.html.
    """

    name: str
    about: str
    recipes: Mapping[str, Recipe]
    grid: tuple[int, ...]
    gammas: tuple[float, ...]
    robust_steps: tuple[int, ...]
    attacks: Mapping[str, str] = field(default_factory=dict)
    images: int = 0
    like_paper: bool = True


_FEW_IMAGES = ("average=0", "evaluation.restarts=5", "data.test_size=2000")
_CLEAN_START = ("clean_warmup=0.064", "eps_warmup=0", "lr=0.001")
"""Of the MNIST study: 300 clean updates, and then the full eps at a fifth of the learning rate."""
_ONE_CYCLE = ("schedule.name=one-cycle", "schedule.warmup=0.4")
_STOP = ("eps_warmup=0", "stop_at_success=true", "start=clipped", "training.batch_size=100", *_ONE_CYCLE)
"""Of the MNIST study: as the MNIST code of fast adversarial training (Wong et al., 2020) trains by PGD."""


def _recipes(ending: str = "", *cifar10: str) -> dict[str, Recipe]:
    """Return the recipes whose names end in ``ending``; ``cifar10`` are changes of TRADES and MART."""
    return {
        "trades": (f"cifar10-trades{ending}", cifar10),
        "mart": (f"cifar10-mart{ending}", cifar10),
        "augmix10": (f"cifar10-augmix{ending}", ()),
        "augmix100": (f"cifar100-augmix{ending}", ()),
        "mnist": ("mnist-pgd", ("average=0",)),
        "mnist-clean": ("mnist-pgd", (*_FEW_IMAGES, *_CLEAN_START)),
        "mnist-stop": ("mnist-pgd", (*_FEW_IMAGES, *_STOP, *(("epochs=5",) if ending else ()))),
    }


_TINY = ("epochs=2", "data.validation=0", "probe=0", "average=0", "log_every=3", "evaluation.steps=10")
_ORACLE = ("objective=pgd-at", "beta=null", "separation=oracle", "boundary=7", "robust=7", "scale=1.7")
_GROUPS = "attack_group=4"
"""Attack four batches at once; otherwise WRN-34-10 would take half as long again."""
SMOKE = Scale(
    "smoke",
    "scikit-learn's digits, a small CNN, two epochs: shows that everything runs, says nothing about the method",
    {
        "trades": ("digits", _TINY),
        "mart": ("digits", (*_TINY, "objective=mart", "beta=5")),
        "augmix10": ("digits-augmix", _TINY),
        "augmix100": ("digits-augmix", _TINY),
        "mnist": ("digits", (*_TINY, *_ORACLE)),
        "mnist-clean": ("digits", (*_TINY, *_ORACLE, "clean_warmup=0.1")),
        "mnist-stop": ("digits", (*_TINY, *_ORACLE, "start=clipped", "stop_at_success=true")),
    },
    grid=(0, 2),
    gammas=(0.65, 0.8, 0.9),
    robust_steps=(0, 2, 5),
    attacks={
        **{"pgd20": "pgd10", "pgd100x20": "pgd10", "pgd100x5": "pgd10", "pgd100x10": "pgd10x2"},
        **dict.fromkeys(("pgd1000x5", "apgd"), "pgd20x2"),
        "autoattack": "pgd:steps=10,restarts=2,loss=margin",  # the real one takes seconds even here
    },
    images=100,
    like_paper=False,
)
SHORT = Scale(
    "short",
    "PreActResNet-18, 30 epochs, one cycle; AugMix with WRN-40-2, 20 epochs; the MNIST study on a thinned grid",
    _recipes("-short"),
    grid=(0, 1, 3, 7),
    gammas=(0.65, 0.75, 0.8, 0.9),
    robust_steps=(0, 1, 2, 5),
)
MEDIUM = replace(
    SHORT,
    name="medium",
    about="WRN-34-10, 30 epochs, one cycle, four mini-batches attacked at once; AugMix and the MNIST study as short",
    recipes=_recipes("-short", "network.name=wrn-34-10", _GROUPS),
)
PAPER = Scale(
    "paper",
    "WRN-34-10, 76 epochs (MART 90), four mini-batches attacked at once; AugMix with WRN-40-2, 100 epochs; the MNIST "
    "study on the full grid",
    _recipes("", _GROUPS),
    grid=tuple(range(8)),
    gammas=(0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
    robust_steps=tuple(range(6)),
)
SCALES = {scale.name: scale for scale in (SMOKE, SHORT, MEDIUM, PAPER)}
