"""The network as it learns in the group engine: training-mode logits, of two batches at once where it allows that."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bullettrain.attacks.state import frozen, training
from bullettrain.engine.joint import Joint
from bullettrain.objectives.base import forward

ENOUGH = 16
"""Images that show whether two batches can be joined; in double precision many would take seconds."""


class Learner:
    """Training-mode forwards of a network.

    Args:
        network: the bare module.
        half: in bf16.
        compile: compiled, once for all sizes.
        joint: the clean and the corrupted batch in one forward, where the network allows it.
        say: told in one line why that forward is not compiled.
    """

    def __init__(
        self, network: nn.Module, *, half: bool, compile: bool, joint: bool, say: Callable[[str], None] = print
    ) -> None:
        self.network, self.half, self.compile, self.wants_joint, self.say = network, half, compile, joint, say
        self.net: nn.Module = compiled(network) if compile else network
        self.joint: Joint | None = None
        self.seconds = 0.0
        """Spent on looking at a first batch, on compiling the joint forward, and on what came of it."""

    def look_at(self, x: Tensor) -> int:
        """The number of classes, from a first batch, which also shows whether two batches can be joined."""
        began = time.perf_counter()
        with frozen(self.network), torch.no_grad(), self._precision():
            classes = int(self.network(x[:1]).shape[1])
        if self.joint is None and self.wants_joint and Joint.suits(self.network, x[:ENOUGH]):
            with training(self.network):  # its parts keep these modes
                self.joint = Joint(self.network, self.half)
            if self.compile:
                self._compile_joint(self.joint, x)
        self.seconds += time.perf_counter() - began
        return classes

    def _compile_joint(self, joint: Joint, x: Tensor) -> None:
        """Compile it, and leave that if it changes gradients."""
        # Without splitting: it makes two kernels of each sum over a few hundred rows.
        joint.compile(options={"split_reductions": False})
        with training(self.network):
            harm = joint.harm(dynamic(x.detach()))
        if harm > 1:
            joint.run = joint.inner
            what = f"differ by {harm:.2g} times what rounding explains" if math.isfinite(harm) else "are lost"
            self.say(
                "updates are not compiled, and take several times as long: compiled by torch "
                f"{torch.__version__}, gradients of this network {what}"
            )

    def both(self, clean: Tensor | None, corrupted: Tensor, z: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Logits of the clean batch and of the corrupted one: None for one that is not there, or is empty.

        ``z``: logits of the clean batch, where they are there already.
        """
        sizes = [len(x) for x in (clean, corrupted) if x is not None]
        if self.joint is not None and z is None and 1 not in sizes:  # a lone example has no statistics
            if clean is None:
                return None, self._together(corrupted, len(corrupted))
            # An empty part would take channels_last from the whole, for which nothing is compiled.
            logits = self._together(torch.cat([clean, corrupted]) if len(corrupted) else clean, len(clean))
            return logits[: len(clean)], logits[len(clean) :] if len(corrupted) else None
        with self._precision():
            if clean is not None:
                z = forward(self.net, dynamic(clean))
            return z, forward(self.net, dynamic(corrupted)) if len(corrupted) else None

    def one_by_one(self, parts: Sequence[Tensor], meanwhile: Callable[[], None]) -> Tensor:
        """Logits of several batches, each by its own statistics, without gradient.

        ``meanwhile`` is called while the network has the statistics after these forwards; then they are put back.
        """
        before, logits = [buffer.clone() for buffer in self.network.buffers()], []
        for part in parts:
            if self.joint is not None and len(part) > 1:
                logits.append(self._together(part, len(part)).detach())
            else:
                with torch.no_grad(), self._precision():
                    logits.append(forward(self.network, part))
        meanwhile()
        with torch.no_grad():
            for buffer, value in zip(self.network.buffers(), before, strict=True):
                buffer.copy_(value)
        return torch.cat(logits)

    def give_back(self) -> None:
        """After a backward: every gradient to the network's own weights."""
        if self.joint is not None:
            self.joint.give_back()

    def _together(self, x: Tensor, count: int) -> Tensor:
        assert self.joint is not None
        self.joint.prepare(count)
        with training(self.network):
            logits: Tensor = self.joint(dynamic(x))
        return logits

    def _precision(self) -> torch.autocast:
        device = next(self.network.parameters()).device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.half)


def compiled(module: nn.Module, **options: bool) -> nn.Module:
    """The module compiled, with options for the compiler."""
    return torch.compile(module, options=dict(options) or None)  # type: ignore[return-value]


def in_any_size(module: nn.Module) -> nn.Module:
    """The module compiled for the plain step, whose batches shrink."""
    return torch.compile(module, dynamic=True)  # type: ignore[return-value]


def dynamic(x: Tensor, dim: int = 0) -> Tensor:
    """Tell the compiler that the batch's size varies; without compilation this does nothing."""
    if x.is_cuda:
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x
