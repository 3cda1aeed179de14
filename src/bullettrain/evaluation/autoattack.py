"""AutoAttack, by other people: the package `pyautoattack`, or the upstream module `autoattack`, as rounds."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bullettrain.attacks import frozen
from bullettrain.evaluation.evaluated_model import EvaluatedModel, correct
from bullettrain.evaluation.specs import AutoAttack
from bullettrain.evaluation.survival import Round
from bullettrain.extras import extra
from bullettrain.precision import arithmetic

STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")
"""Of the standard version, in order; each sees what the ones before have left."""
TARGETS = 9
"""Classes that the targeted attacks of the standard version try."""
PASSES = {"apgd-ce": 2 * 101, "apgd-t": 2 * 101 * TARGETS, "fab-t": 3 * 100 * TARGETS, "square": 5001}
"""Forward and backward passes that an image takes in each attack."""
PACKAGES = ("pyautoattack", "autoattack")
"""Modules, and the distributions that bring them; the one that is preferred first."""


def attack_names(classes: int, *, only_apgd: bool = False) -> tuple[str, ...]:
    """The attacks that ``classes`` allow: the targeted DLR loss of apgd-t compares four logits."""
    names = STANDARD[:2] if only_apgd else STANDARD
    return names if classes >= 4 else tuple(name for name in names if name != "apgd-t")


def installed() -> str:
    """`pyautoattack 0.2.0`: which of the two runs here; ImportError that names the extra where neither does."""
    module = _module()
    try:
        version = importlib.metadata.version(module.__name__)
    except importlib.metadata.PackageNotFoundError:
        version = getattr(module, "__version__", "of unknown version")
    return f"{module.__name__} {version}"


def autoattack_rounds(
    model: nn.Module,
    names: Sequence[str],
    attack: AutoAttack,
    *,
    classes: int,
    seed: int,
    notes: Notes,
    device: torch.device,
) -> list[Round]:
    """A round for each of the attacks ``names``; what they remark while they run is in ``notes``.

    Each batch goes through the package's own ``run_standard_evaluation``, so that its parameters and checks are
    its own. It draws every batch from the one ``seed``, as in its published use.
    """
    module = _module()

    def adversary(attacked: nn.Module) -> Callable[[str, Tensor, Tensor], Tensor]:
        norm = {"linf": "Linf", "l2": "L2"}[attack.norm]
        arguments: dict[str, Any] = {"norm": norm, "eps": attack.eps, "seed": seed}
        arguments |= {"version": "standard", "device": device}
        if "verbose" in inspect.signature(module.AutoAttack).parameters:
            arguments["verbose"] = False
        made = module.AutoAttack(_AsRows(attacked), **arguments)
        made.verbose = False
        for part in (made, made.apgd, made.apgd_targeted):
            part.logger = notes
        made.apgd_targeted.n_target_classes = made.fab.n_target_classes = min(TARGETS, classes - 1)
        evaluate = made.run_standard_evaluation
        size = "batch_size" if "batch_size" in inspect.signature(evaluate).parameters else "bs"

        def run(name: str, x: Tensor, y: Tensor) -> Tensor:
            made.attacks_to_run = [name]
            with frozen(attacked), _own_noise(device):
                found = evaluate(x.contiguous(), y, **{size: len(x)})
            images: Tensor = found[0] if isinstance(found, tuple) else found
            return images

        return run

    searching = adversary(model)
    exact = adversary(model.exact) if isinstance(model, EvaluatedModel) else searching

    def taken_for(x: Tensor) -> Tensor:
        with frozen(model), torch.no_grad():
            classes: Tensor = model(x).argmax(dim=1)
        return classes

    def survives(name: str, x: Tensor, y: Tensor) -> Tensor:
        x_adv, right = x.clone(), taken_for(x) == y
        if right.any():
            x_adv[right] = searching(name, x[right], y[right])
        alive = correct(model, x_adv, y)
        # Mistaken by rounding alone, the search has passed these over or stopped early: once more, in real float32.
        mistaken = alive & (taken_for(x_adv) != y)
        if mistaken.any():
            with arithmetic("float32"):
                x_adv[mistaken] = exact(name, x[mistaken], y[mistaken])
            alive[mistaken] = correct(model, x_adv[mistaken], y[mistaken])
        return alive

    def as_round(name: str) -> Round:
        return Round(name, lambda x, y, _: survives(name, x, y), passes=PASSES[name])

    return [as_round(name) for name in names]


class _AsRows(nn.Module):
    """The network, with gradients that lie row by row: the package views them as (m, -1), channels last or not."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Logits (m, K) of images x (m, C, H, W)."""
        if x.requires_grad:
            x = x.clone()  # a tensor of our own, whose gradient may be laid out anew on its way back
            x.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
        logits: Tensor = self.model(x)
        return logits


class Notes:
    """What the package remarks, each once; it stands in for its logger."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def warning(self, text: str) -> None:
        """A remark about the network or the outcome."""
        said = str(text).removeprefix("Warning: ").partition(" See ")[0].strip()
        if said not in self.texts:
            self.texts.append(said)

    def log(self, text: str) -> None:
        """Upstream says everything here; quiet, it says only what it warns of."""
        if str(text).startswith("Warning: "):
            self.warning(text)

    def info(self, text: str) -> None:
        """Progress, which is told elsewhere."""

    debug = info


@contextmanager
def _own_noise(device: torch.device) -> Iterator[None]:
    """The package seeds torch's global generators: they are the caller's again afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        yield


def _module() -> Any:
    with extra("AutoAttack", "eval"):
        there = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
        return importlib.import_module((there or list(PACKAGES))[0])
