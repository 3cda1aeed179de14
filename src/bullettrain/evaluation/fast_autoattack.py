"""AutoAttack in L∞ at the speed of a GPU: a frozen copy in bf16, compiled and captured, searches; float32 decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.attacks.state import dynamic, frozen, uncompiled
from bullettrain.engine.cuda_graphs import CudaGraphRunner
from bullettrain.engine.frozen_copy import FrozenCopy
from bullettrain.evaluation.autoattack import PASSES, TARGETS, Notes
from bullettrain.evaluation.evaluated_model import EvaluatedModel, float32_logits, is_right
from bullettrain.evaluation.search import APGD, FAB, Attack, MakeRunner, Square, Tick, eager, margins
from bullettrain.evaluation.survival import Round
from bullettrain.precision import arithmetic

VERSION = "bf16 search 1"
"""Changes with whatever changes results; part of their keys."""
DOUBT = 3.0
"""Images whose margin in float32 is within so many times what the copy's margins are off are attacked once more, in
float32: the copy may have stopped short of them."""
STEP = 16
"""Buffers hold a multiple of so many images, so that batches of nearly one size share a graph."""


class SearchCopy(nn.Module):
    """A network frozen in eval mode, for attacks: in bf16, but for its last linear layer, so that margins are finer."""

    def __init__(self, network: nn.Module, images: Tensor) -> None:
        super().__init__()
        network = uncompiled(network)
        self.inner = FrozenCopy(network, torch.bfloat16, folded=FrozenCopy.folds(network, images)).copy
        layers = [(name, part) for name, part in network.named_modules() if isinstance(part, (nn.Conv2d, nn.Linear))]
        name, last = layers[-1] if layers else ("", None)
        if name and isinstance(last, nn.Linear):
            self._exact_last(name, last, images)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, K) in float32 of images x (n, C, H, W)."""
        with torch.autocast(x.device.type, torch.bfloat16):
            logits: Tensor = self.inner(x)
        return logits.float()

    def _exact_last(self, name: str, linear: nn.Linear, images: Tensor) -> None:
        before = self.inner.get_submodule(name)
        self.inner.set_submodule(name, _ExactLinear(linear))
        try:
            with torch.no_grad():
                self(images)
        except Exception:  # a network that looks into its layers
            self.inner.set_submodule(name, before)


class _ExactLinear(nn.Module):
    """A linear layer in float32, whatever is around it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().clone())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """(n, out)."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight, self.bias)  # type: ignore[arg-type]


class Searcher:
    """Runs the attacks on one network: keeps the buffers and graphs of the last sizes.

    Args:
        network: logits of images, with gradients for the images.
        eps: radius of the ball.
        make_runner: what runs an attack's iterations.
        make: how an attack is made from its name; others in tests, with fewer iterations.
    """

    def __init__(
        self,
        network: Callable[[Tensor], Tensor],
        eps: float,
        make_runner: MakeRunner = eager,
        make: Callable[..., Attack] | None = None,
    ) -> None:
        self.network, self.eps, self.make_runner, self.make = network, eps, make_runner, make or make_attack
        self.attacks: dict[str, Attack] = {}

    def __call__(
        self, name: str, x: Tensor, y: Tensor, target: Tensor | None, generator: torch.Generator, tick: Tick | None
    ) -> tuple[Tensor, Tensor]:
        """Candidates (n, C, H, W) of an attack, and their margins (n,) as the network has them."""
        room = len(self.attacks[name].x) if name in self.attacks else 0
        if not 0.8 * room <= len(x) <= room:
            self.attacks.clear()  # graphs and buffers of other attacks and sizes
            like = x.new_zeros(-(-len(x) // STEP) * STEP, *x.shape[1:])
            if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
                like = like.contiguous(memory_format=torch.channels_last)
            self.attacks[name] = self.make(name, self.network, like, self.eps, self.make_runner)
        return self.attacks[name](x, y, target, generator, tick)


def make_attack(name: str, network: Callable[[Tensor], Tensor], like: Tensor, eps: float, runner: MakeRunner) -> Attack:
    """An attack of the standard version."""
    if name == "fab-t":
        return FAB(network, like, eps, runner)
    if name == "square":
        return Square(network, like, eps, runner)
    return APGD(network, like, eps, runner, targeted=name == "apgd-t")


def fast_rounds(
    model: EvaluatedModel,
    names: Sequence[str],
    *,
    eps: float,
    classes: int,
    seed: int,
    images: Tensor,
    notes: Notes,
    tick: Callable[[int], None] | None = None,
    make: Callable[..., Attack] | None = None,
) -> list[Round]:
    """A round for each of the attacks ``names``.

    A copy of the network in bf16 searches. Whether a candidate counts is decided in float32, by :func:`float32_logits`;
    where that is close, float32 searches, too.

    Args:
        model: the network; compiled, its copy is, too.
        names: of the standard version.
        eps: radius in L∞.
        classes: K.
        seed: of all noise; every batch draws from it, as in AutoAttack's published use.
        images: two or more, to try the copy on.
        notes: told in one line what makes a result doubtful.
        tick: told how many passes of the batch under way are done.
        make: makes attacks; None: those of the standard version.
    """
    copy = SearchCopy(model.network, images[:2])
    network: nn.Module = torch.compile(copy) if model.is_compiled and images.is_cuda else copy  # type: ignore[assignment]
    search = Searcher(lambda x: network(dynamic(x)), eps, _captured(notes.warning) if images.is_cuda else eager, make)
    exactly = Searcher(model.exact, eps, eager, make)
    checked = False

    def survives(name: str, x: Tensor, y: Tensor) -> Tensor:
        nonlocal checked
        generator = torch.Generator(x.device).manual_seed(seed)
        logits = float32_logits(model, x)
        if not checked:
            for text in _checks(model, x, logits):
                notes.warning(text)
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

            found, guessed = search(name, x[rows], y[rows], target, generator, done)
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
                found, guessed = exactly(name, x[close], y[close], aim[close], generator, None)
            alive[close] = torch.where(guessed.isfinite(), is_right(float32_logits(model, found), y[close]), True)
        return alive

    def as_round(name: str) -> Round:
        return Round(name, lambda x, y, _: survives(name, x, y), passes=PASSES[name], even=True)

    return [as_round(name) for name in names]


def _captured(warn: Callable[[str], None]) -> MakeRunner:
    """Iterations of a search as CUDA graphs; they may differ from eager ones: whatever they find, float32 decides."""
    return lambda state: CudaGraphRunner(state, warn, slack=math.inf)


def _checks(model: nn.Module, x: Tensor, logits: Tensor) -> list[str]:
    """What makes AutoAttack's standard version the wrong measure of a network."""
    found = []
    if not torch.allclose(float32_logits(model, x), logits, rtol=1e-3, atol=1e-4):
        found.append("the network is random: the same images have other logits each time")
    if logits.min() > -1e-5 and (logits.sum(dim=1) - 1).abs().max() < 1e-5:
        found.append("the network returns probabilities, not logits")
    return found
