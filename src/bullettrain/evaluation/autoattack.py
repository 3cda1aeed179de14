"""AutoAttack as rounds: by other people's package, or in L∞ at the speed of a GPU; float32 decides either way."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.attacks.state import dynamic, frozen, uncompiled
from bullettrain.engine.cuda_graphs import CudaGraphRunner
from bullettrain.engine.frozen_copy import FrozenCopy
from bullettrain.evaluation.accuracy import EvaluatedModel, Round, correct, float32_logits, is_right
from bullettrain.evaluation.search import ATTACKS, Attack, MakeRunner, eager, margins
from bullettrain.evaluation.specs import AutoAttack
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
FAST_VERSION = "bf16 search 1"
"""Of :func:`fast_rounds`: changes with whatever changes results; part of their keys."""
DOUBT = 3.0
"""Images whose margin in float32 is within so many times what the copy's margins are off are attacked once more, in
float32: the copy may have stopped short of them."""
STEP = 16
"""Buffers hold a multiple of so many images, so that batches of nearly one size share a graph."""


def attack_names(classes: int, *, only_apgd: bool = False) -> tuple[str, ...]:
    """The attacks that ``classes`` allow: the targeted DLR loss of apgd-t compares four logits."""
    names = STANDARD[:2] if only_apgd else STANDARD
    return names if classes >= 4 else tuple(name for name in names if name != "apgd-t")


class Notes(list[str]):
    """What attacks remark, each once; it stands in for the package's logger."""

    def warning(self, text: str) -> None:
        """A remark about the network or the outcome."""
        said = str(text).removeprefix("Warning: ").partition(" See ")[0].strip()
        if said not in self:
            self.append(said)

    def log(self, text: str) -> None:
        """Upstream says everything here; quiet, it says only what it warns of."""
        if str(text).startswith("Warning: "):
            self.warning(text)

    def info(self, text: str) -> None:
        """Progress, which is told elsewhere."""

    debug = info


# ------------------------------------------------------------------------------------------------- the package


def installed() -> str:
    """`pyautoattack 0.2.0`: which of the two runs here; ImportError that names the extra where neither does."""
    module = _module()
    try:
        version = importlib.metadata.version(module.__name__)
    except importlib.metadata.PackageNotFoundError:
        version = getattr(module, "__version__", "of unknown version")
    return f"{module.__name__} {version}"


def _module() -> Any:
    with extra("AutoAttack", "eval"):
        there = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
        return importlib.import_module((there or list(PACKAGES))[0])


def autoattack_rounds(
    model: nn.Module, attack: AutoAttack, names: Sequence[str], *, classes: int, seed: int, notes: Notes, images: Tensor
) -> list[Round]:
    """A round for each of the attacks ``names``; what they remark while they run is in ``notes``.

    Each batch goes through the package's own ``run_standard_evaluation``, so that its parameters and checks are
    its own. It draws every batch from the one ``seed``, as in its published use. ``images`` are two or more of them.
    """
    module, device = _module(), images.device

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
        # The package seeds torch's global generators: they are the caller's again afterwards.
        devices = [device] if device.type == "cuda" else []

        def run(name: str, x: Tensor, y: Tensor) -> Tensor:
            made.attacks_to_run = [name]
            with frozen(attacked), torch.random.fork_rng(devices=devices, device_type="cuda"):
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

    return _as_rounds(names, survives)


def _as_rounds(
    names: Sequence[str], survives: Callable[[str, Tensor, Tensor], Tensor], *, even: bool = False
) -> list[Round]:
    def as_round(name: str) -> Round:
        return Round(name, lambda x, y, _: survives(name, x, y), PASSES[name], even)

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


# ------------------------------------------------------------------------------- a frozen copy in bf16 searches


def fast_rounds(
    model: EvaluatedModel,
    attack: AutoAttack,
    names: Sequence[str],
    *,
    classes: int,
    seed: int,
    notes: Notes,
    images: Tensor,
    tick: Callable[[int], None] | None = None,
) -> list[Round]:
    """A round for each of the attacks ``names``, in L∞.

    A copy of the network in bf16 searches, on a GPU captured in CUDA graphs. Whether a candidate counts is decided in
    float32, by :func:`float32_logits`; where that is close, float32 searches, too.

    Args:
        model: the network; compiled, its copy is, too.
        attack: radius of the ball.
        names: of the standard version.
        classes: K.
        seed: of all noise; every batch draws from it, as in AutoAttack's published use.
        notes: told in one line what makes a result doubtful.
        images: two or more, to try the copy on.
        tick: told how many passes of the batch under way are done.
    """
    network: nn.Module = SearchCopy(model.network, images[:2])
    if model.is_compiled and images.is_cuda:
        network = torch.compile(network)  # type: ignore[assignment]

    def captured(state: Callable[[], Sequence[Tensor]]) -> CudaGraphRunner:
        # Replays may differ from eager iterations: whatever they find, float32 decides.
        return CudaGraphRunner(state, notes.warning, slack=math.inf)

    search = _Searcher(lambda x: network(dynamic(x)), attack.eps, captured if images.is_cuda else eager)
    exactly = _Searcher(model.exact, attack.eps, eager)
    checked = False

    def survives(name: str, x: Tensor, y: Tensor) -> Tensor:
        nonlocal checked
        generator = torch.Generator(x.device).manual_seed(seed)
        logits = float32_logits(model, x)
        if not checked:
            _check_network(model, x, logits, notes)
        checked = True
        alive, order = is_right(logits, y), logits.argsort(dim=1)
        jobs = range(2, min(TARGETS, classes - 1) + 2) if name in ("apgd-t", "fab-t") else [1]
        closest, aim = torch.full_like(logits[:, 0], torch.inf), torch.zeros_like(y)
        off = 0.0
        for number, job in enumerate(jobs):
            rows = alive.nonzero()[:, 0]
            if not len(rows):
                break
            target = order[rows, -job]

            def done(share: float, number: int = number) -> None:
                if tick is not None:
                    tick(round(len(x) * PASSES[name] * (number + share) / len(jobs)))

            found, guessed = search(name, x[rows])(x[rows], y[rows], target, generator, done)
            now = float32_logits(model, found)
            margin = margins(now, y[rows])
            both = guessed.isfinite() & margin.isfinite()  # FAB may not have met the ball
            off = max(off, float((guessed - margin)[both].square().mean().sqrt()) if both.any() else 0.0)
            alive[rows] = torch.where(guessed.isfinite(), is_right(now, y[rows]), True)
            closer = torch.where(guessed.isfinite(), margin, torch.inf) < closest[rows]
            closest[rows] = torch.where(closer, margin, closest[rows])
            aim[rows] = torch.where(closer, target, aim[rows])
        close = (alive & (closest < DOUBT * off)).nonzero()[:, 0]
        if len(close):
            with arithmetic("float32"), frozen(model):
                found, guessed = exactly(name, x[close])(x[close], y[close], aim[close], generator)
            alive[close] = torch.where(guessed.isfinite(), is_right(float32_logits(model, found), y[close]), True)
        return alive

    return _as_rounds(names, survives, even=True)


class _Searcher:
    """Attacks on one network: keeps the buffers and graphs of the last one, while they fit."""

    def __init__(self, network: Callable[[Tensor], Tensor], eps: float, make_runner: MakeRunner) -> None:
        self.network, self.eps, self.make_runner = network, eps, make_runner
        self.attack: Attack | None = None

    def __call__(self, name: str, x: Tensor) -> Attack:
        """The attack ``name``, with room for images x (n, C, H, W)."""
        last, kind = self.attack, ATTACKS[name]
        if last is not None and type(last) is kind and 0.8 * len(last.x) <= len(x) <= len(last.x):
            return last
        last = self.attack = None  # its memory goes before there is more
        like = F.pad(x, (0,) * 7 + (-len(x) % STEP,))
        self.attack = kind(self.network, like, self.eps, self.make_runner)
        return self.attack


class SearchCopy(nn.Module):
    """A network frozen in eval mode, for attacks: in bf16, but for its last linear layer, so that margins are finer."""

    def __init__(self, network: nn.Module, images: Tensor) -> None:
        super().__init__()
        network = uncompiled(network)
        self.inner = FrozenCopy(network, torch.bfloat16, folded=FrozenCopy.folds(network, images)).copy
        layers = [(name, part) for name, part in network.named_modules() if isinstance(part, (nn.Conv2d, nn.Linear))]
        name, last = layers[-1] if layers else ("", None)
        if not name or not isinstance(last, nn.Linear):
            return
        rounded = self.inner.get_submodule(name)
        self.inner.set_submodule(name, _ExactLinear(last))
        try:
            with torch.no_grad():
                self(images)
        except Exception:  # a network that looks into its layers
            self.inner.set_submodule(name, rounded)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, K) in float32 of images x (n, C, H, W)."""
        with torch.autocast(x.device.type, torch.bfloat16):
            logits: Tensor = self.inner(x)
        return logits.float()


class _ExactLinear(nn.Module):
    """A linear layer in float32, whatever is around it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = copy.deepcopy(linear).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, out)."""
        with torch.autocast(x.device.type, enabled=False):
            logits: Tensor = self.linear(x.float())
        return logits


def _check_network(model: nn.Module, x: Tensor, logits: Tensor, notes: Notes) -> None:
    """Note what makes AutoAttack's standard version the wrong measure of a network."""
    if not torch.allclose(float32_logits(model, x), logits, rtol=1e-3, atol=1e-4):
        notes.warning("the network is random: the same images have other logits each time")
    if logits.min() > -1e-5 and (logits.sum(dim=1) - 1).abs().max() < 1e-5:
        notes.warning("the network returns probabilities, not logits")
