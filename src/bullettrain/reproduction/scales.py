"""How large a reproduction is: seconds on digits, minutes on a GPU, or as the paper did it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bullettrain.checks import instead
from bullettrain.training.settings import ConfigError

Base = tuple[str, tuple[str, ...]]
"""A recipe, and what is changed in it, as `--set` takes it."""


@dataclass(frozen=True)
class Scale:
    """What the paper's settings become at one size."""

    name: str
    about: str
    recipes: Mapping[str, Base]
    """By what the paper trains: trades, mart, augmix10, augmix100, mnist."""
    grid: tuple[int, ...]
    """Step counts of the MNIST study."""
    gammas: tuple[float, ...]
    robust_steps: tuple[int, ...]
    """N_R of its sweep."""
    attacks: Mapping[str, str] = field(default_factory=dict)
    """Attacks of the paper that are replaced by shorter ones."""
    size: int = 0
    """Test images for attacks that training does not end with anyway; 0: all."""
    report: bool = True
    """Whether every run gets its report.html."""
    like_paper: bool = True
    """Whether its figures can be put beside the paper's at all."""

    def attack(self, name: str) -> str:
        """What the paper's attack ``name`` is at this size."""
        return self.attacks.get(name, name)


_TINY = ("epochs=2", "data.validation=0", "probe=0", "average=0", "log_every=3", "evaluation.steps=10")

SMOKE = Scale(
    "smoke",
    "scikit-learn's digits, a small CNN, two epochs: shows that everything runs, says nothing about the method",
    {
        "trades": ("digits", _TINY),
        "mart": ("digits", (*_TINY, "objective=mart", "beta=5")),
        "augmix10": ("digits-augmix", _TINY),
        "augmix100": ("digits-augmix", _TINY),
        "mnist": (
            "digits",
            (
                *_TINY,
                *("objective=pgd-at", "beta=null", "separation=oracle"),
                *("boundary=7", "robust=7", "scale=1.7"),
            ),
        ),
    },
    grid=(0, 2),
    gammas=(0.65, 0.8, 0.9),
    robust_steps=(0, 2, 5),
    attacks={
        **{"pgd20": "pgd10", "pgd100x20": "pgd10", "pgd100x10": "pgd10x2", "pgd1000x5": "pgd20x2"},
        "autoattack": "pgd:steps=10,restarts=2,loss=margin",  # the real one takes seconds even here
    },
    size=100,
    report=False,
    like_paper=False,
)

SHORT = Scale(
    "short",
    "PreActResNet-18, 30 epochs, one cycle; AugMix with WRN-40-2, 20 epochs; the MNIST study on a thinned grid",
    {
        "trades": ("cifar10-trades-short", ()),
        "mart": ("cifar10-mart-short", ()),
        "augmix10": ("cifar10-augmix-short", ()),
        "augmix100": ("cifar100-augmix-short", ()),
        "mnist": ("mnist-pgd", ("average=0",)),
    },
    grid=(0, 1, 3, 7),
    gammas=(0.65, 0.75, 0.8, 0.9),
    robust_steps=(0, 1, 2, 5),
)

PAPER = Scale(
    "paper",
    "WRN-34-10, 76 epochs (MART 90); AugMix with WRN-40-2, 100 epochs; the MNIST study on the full grid",
    {
        "trades": ("cifar10-trades", ()),
        "mart": ("cifar10-mart", ()),
        "augmix10": ("cifar10-augmix", ()),
        "augmix100": ("cifar100-augmix", ()),
        "mnist": ("mnist-pgd", ("average=0",)),
    },
    grid=tuple(range(8)),
    gammas=(0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
    robust_steps=tuple(range(6)),
)

SCALES = {scale.name: scale for scale in (SMOKE, SHORT, PAPER)}


def find_scale(name: str) -> Scale:
    """The scale called ``name``."""
    if name not in SCALES:
        raise ConfigError(f"--scale is {name!r}{instead(name, SCALES)}")
    return SCALES[name]
