"""AutoAttack in L∞ at the speed of a GPU: a copy of the network in bf16 searches, and float32 decides."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bullettrain.attacks.state import dynamic, frozen, uncompiled
from bullettrain.engine.cuda_graphs import CudaGraphRunner
from bullettrain.engine.frozen_copy import FrozenCopy
from bullettrain.evaluation.accuracy import EvaluatedModel, float32_logits, is_right
from bullettrain.evaluation.autoattack import TARGETS, Ensemble, passes
from bullettrain.evaluation.masking import probabilities_note
from bullettrain.evaluation.search import ATTACKS, MakeRunner, Search, eager, margins
from bullettrain.precision import arithmetic

VERSION = "bf16 search 1"
"""Part of the keys of results: change it when results change."""
DOUBTFUL_ERRORS = 3.0
"""Images whose float32 margin is below this multiple of the copy's error are attacked again in float32."""
SIZE_MULTIPLE = 16
"""Buffers hold a multiple of this many images, so that batches of similar size share a CUDA graph."""


@dataclass
class FastEnsemble(Ensemble):
    """AutoAttack in L∞, searched by a copy of the network in bf16, on a GPU in CUDA graphs.

    Whether a candidate counts is decided by :func:`float32_logits`. Images close to the boundary are attacked again
    in float32.
    """

    model: EvaluatedModel
    even = True

    def __post_init__(self) -> None:
        network: nn.Module = SearchCopy(self.model.network, self.images[:2])
        if self.model.is_compiled and self.images.is_cuda:
            network = torch.compile(network)  # type: ignore[assignment]

        def captured(state: Callable[[], Sequence[Tensor]]) -> CudaGraphRunner:
            # Replays may differ from eager iterations: float32 decides anyway.
            return CudaGraphRunner(state, self.notes.warning, slack=math.inf)

        runner = captured if self.images.is_cuda else eager
        self.search = _Searcher(lambda x: network(dynamic(x)), self.attack.eps, runner)
        self.exact = _Searcher(self.model.exact, self.attack.eps, eager)
        self.checked = False

    def survives(self, name: str, x: Tensor, y: Tensor, seed: int) -> Tensor:
        """Search with the copy, then in float32 where that is close; the seed of a batch is always the ensemble's."""
        generator = torch.Generator(x.device).manual_seed(self.seed)
        logits = float32_logits(self.model, x)
        if not self.checked:
            self._check_network(x, logits)
        self.checked = True
        alive, order = is_right(logits, y), logits.argsort(dim=1)
        ranks = range(2, min(TARGETS, self.classes - 1) + 2) if name in ("apgd-t", "fab-t") else [1]
        closest, aim = torch.full_like(logits[:, 0], torch.inf), torch.zeros_like(y)
        error = 0.0
        for number, rank in enumerate(ranks):
            rows = alive.nonzero()[:, 0]
            if not len(rows):
                break
            target = order[rows, -rank]

            def tick(share: float, number: int = number) -> None:
                self.tick(round(len(x) * passes(name, self.classes) * (number + share) / len(ranks)))

            x_adv, estimate = self.search(name, x[rows], y[rows], target, generator, tick)
            found = estimate.isfinite()  # FAB may not have entered the ball
            logits = float32_logits(self.model, x_adv)
            margin = margins(logits, y[rows])
            both = found & margin.isfinite()
            error = max(error, float((estimate - margin)[both].square().mean().sqrt()) if both.any() else 0.0)
            alive[rows] = is_right(logits, y[rows]) | ~found
            closer = found & (margin < closest[rows])
            closest[rows] = torch.where(closer, margin, closest[rows])
            aim[rows] = torch.where(closer, target, aim[rows])
        close = (alive & (closest < DOUBTFUL_ERRORS * error)).nonzero()[:, 0]
        if len(close):
            with arithmetic("float32"), frozen(self.model):
                x_adv, estimate = self.exact(name, x[close], y[close], aim[close], generator)
            alive[close] = is_right(float32_logits(self.model, x_adv), y[close]) | ~estimate.isfinite()
        return alive

    def _check_network(self, x: Tensor, logits: Tensor) -> None:
        """Add a warning if AutoAttack's standard version does not apply to the network."""
        if not torch.allclose(float32_logits(self.model, x), logits, rtol=1e-3, atol=1e-4):
            self.notes.warning("the network is random: the same images have other logits each time")
        for note in probabilities_note(logits):
            self.notes.warning(note)


class _Searcher:
    """Attacks one network; keeps the buffers and graphs of the last attack as long as they fit."""

    def __init__(self, network: Callable[[Tensor], Tensor], eps: float, make_runner: MakeRunner) -> None:
        self.network, self.eps, self.make_runner = network, eps, make_runner
        self.attack: Search | None = None

    def __call__(self, name: str, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Run the attack ``name`` on x (n, C, H, W); ``arguments`` are those of :class:`Search` after ``x``."""
        last, kind = self.attack, ATTACKS[name]
        if last is None or type(last) is not kind or not 0.8 * len(last.x) <= len(x) <= len(last.x):
            last = self.attack = None  # free its memory first
            like = F.pad(x, (0,) * 7 + (-len(x) % SIZE_MULTIPLE,))
            last = self.attack = kind(self.network, like, self.eps, self.make_runner)
        return last(x, *arguments)


class SearchCopy(nn.Module):
    """A frozen copy of a network in bf16, with its last linear layer in float32, which makes margins finer."""

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
        except Exception:  # a network that uses attributes of its layers
            self.inner.set_submodule(name, rounded)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, K) in float32 of images x (n, C, H, W)."""
        with torch.autocast(x.device.type, torch.bfloat16):
            logits: Tensor = self.inner(x)
        return logits.float()


class _ExactLinear(nn.Module):
    """A linear layer that runs in float32 under autocast."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = copy.deepcopy(linear).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, out) features."""
        with torch.autocast(x.device.type, enabled=False):
            logits: Tensor = self.linear(x.float())
        return logits
