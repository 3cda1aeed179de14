"""AutoAttack as rounds of an evaluation, run by a published package. Float32 decides which images survive."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bullettrain.attacks.state import frozen
from bullettrain.evaluation.accuracy import EvaluatedModel, Round, correct
from bullettrain.evaluation.specs import APGD, AutoAttack
from bullettrain.extras import extra
from bullettrain.precision import arithmetic

STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")
"""Attacks of the standard version, in order; each attacks the images that the ones before have left."""
TARGETS = 9
"""Number of target classes in the standard version."""
PACKAGES = ("pyautoattack", "autoattack")
"""Supported packages; the first is preferred."""


def attack_names(classes: int, *, only_apgd: bool = False) -> tuple[str, ...]:
    """Return the attacks to run. The targeted DLR loss of apgd-t needs at least four classes."""
    names = STANDARD[:2] if only_apgd else STANDARD
    return names if classes >= 4 else tuple(name for name in names if name != "apgd-t")


def passes(name: str, classes: int) -> int:
    """Return the forward and backward passes per image of an attack."""
    targets = min(TARGETS, classes - 1)
    return {"apgd-ce": 2 * 101, "apgd-t": 2 * 101 * targets, "fab-t": 3 * 100 * targets, "square": 5001}[name]


class Notes(list[str]):
    """Warnings of attacks, each once; also replaces the package's logger."""

    def warning(self, text: str) -> None:
        """Add a warning about the network or the result."""
        message = str(text).removeprefix("Warning: ").partition(" See ")[0].strip()
        if message not in self:
            self.append(message)

    def log(self, text: str) -> None:
        """Add the message if it is a warning. The upstream package logs everything here."""
        if str(text).startswith("Warning: "):
            self.warning(text)

    def info(self, text: str) -> None:
        """Ignore progress messages."""

    debug = info


@dataclass
class Ensemble(ABC):
    """The attacks of AutoAttack, or its first two (:class:`APGD`), on one network.

    Args:
        model: the network, in the precision that the attacks search in.
        attack: norm and radius of the ball.
        images: at least two images, to try the network on.
        classes: number of classes K.
        seed: seed of every batch, as in AutoAttack's published use.
        notes: collects warnings while the attacks run.
        tick: called with the number of passes done of the current batch, if the attack reports them.
    """

    model: nn.Module
    attack: AutoAttack
    images: Tensor
    classes: int
    seed: int
    notes: Notes
    tick: Callable[[int], None] = lambda passes: None
    even: ClassVar[bool] = False
    """See :class:`Round`."""

    def rounds(self, names: Sequence[str] = ()) -> list[Round]:
        """Return one round for each of the attacks ``names``; by default, for all that apply."""
        if not names:
            names = attack_names(self.classes, only_apgd=isinstance(self.attack, APGD))
            if "apgd-t" not in names:
                reason = f"its loss compares four classes, and there are {self.classes}"
                self.notes.warning(f"apgd-t is left out: {reason}")
        return [Round(name, partial(self.survives, name), passes(name, self.classes), self.even) for name in names]

    @abstractmethod
    def survives(self, name: str, x: Tensor, y: Tensor, seed: int) -> Tensor:
        """Return (m,) bool: which of x (m, C, H, W) with labels y (m,) the attack ``name`` does not break."""


def installed() -> str:
    """Return the installed package and its version, e.g. `pyautoattack 0.2.0`.

    Raises:
        ImportError: neither package is installed.
    """
    module = _module()
    try:
        version = importlib.metadata.version(module.__name__)
    except importlib.metadata.PackageNotFoundError:
        version = getattr(module, "__version__", "of unknown version")
    return f"{module.__name__} {version}"


def _module() -> Any:
    with extra("AutoAttack", "eval"):
        available = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
        return importlib.import_module((available or list(PACKAGES))[0])


@dataclass
class PackageEnsemble(Ensemble):
    """AutoAttack by the package.

    Each batch goes through the package's own ``run_standard_evaluation``, with its own parameters and checks.
    """

    def __post_init__(self) -> None:
        self.search = self.exact = self._adversary(self.model)
        if isinstance(self.model, EvaluatedModel):
            self.exact = self._adversary(self.model.exact)

    def _adversary(self, model: nn.Module) -> Callable[[str, Tensor, Tensor], Tensor]:
        """Return a function that runs one attack of the package: ``run(name, x, y) -> x_adv``."""
        module, device = _module(), self.images.device
        upstream = module.__name__ == "autoattack"  # its arguments differ
        options: dict[str, Any] = {"norm": {"linf": "Linf", "l2": "L2"}[self.attack.norm], "eps": self.attack.eps}
        options |= {"seed": self.seed, "version": "standard", "device": device}
        made = module.AutoAttack(_AsRows(model), **options, **({"verbose": False} if upstream else {}))
        made.verbose = False
        for part in (made, made.apgd, made.apgd_targeted):
            part.logger = self.notes
        made.apgd_targeted.n_target_classes = made.fab.n_target_classes = min(TARGETS, self.classes - 1)
        # The package seeds torch's global generators; fork_rng restores them.
        devices = [device] if device.type == "cuda" else []

        def run(name: str, x: Tensor, y: Tensor) -> Tensor:
            made.attacks_to_run = [name]
            size = {"bs" if upstream else "batch_size": len(x)}
            with frozen(model), torch.random.fork_rng(devices=devices, device_type="cuda"):
                output = made.run_standard_evaluation(x.contiguous(), y, **size)
            x_adv: Tensor = output[0] if isinstance(output, tuple) else output
            return x_adv

        return run

    def _predict(self, x: Tensor) -> Tensor:
        with frozen(self.model), torch.no_grad():
            labels: Tensor = self.model(x).argmax(dim=1)
        return labels

    def survives(self, name: str, x: Tensor, y: Tensor, seed: int) -> Tensor:
        """Search in the model's precision; repeat in float32 where rounding misled the search."""
        x_adv, right = x.clone(), self._predict(x) == y
        if right.any():
            x_adv[right] = self.search(name, x[right], y[right])
        alive = correct(self.model, x_adv, y)
        # Misclassified by rounding alone: the search has skipped these or stopped early.
        mistaken = alive & (self._predict(x_adv) != y)
        if mistaken.any():
            with arithmetic("float32"):
                x_adv[mistaken] = self.exact(name, x[mistaken], y[mistaken])
            alive[mistaken] = correct(self.model, x_adv[mistaken], y[mistaken])
        return alive


class _AsRows(nn.Module):
    """The network with contiguous gradients: the package views them as (m, -1), which channels-last ones cannot be."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (m, K) of images x (m, C, H, W)."""
        if x.requires_grad:
            x = x.clone()  # so that the hook is not registered on the caller's tensor
            x.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
        logits: Tensor = self.model(x)
        return logits
