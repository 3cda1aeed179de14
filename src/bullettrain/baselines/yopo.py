"""YOPO-m-n: between full passes the attack moves through the first layer only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bullettrain.allocation import StepBudget
from bullettrain.attacks import Attack
from bullettrain.attacks.ascent import LogitGradient, Move
from bullettrain.attacks.state import forward_some, uncompiled
from bullettrain.baselines.fast import attacked
from bullettrain.objectives import AdversarialObjective
from bullettrain.step import BulletTrain
from bullettrain.validation import check_count


class FirstLayer:
    """A step of YOPO: one pass over the network, then ``updates`` moves through its first layer.

    The pass gives p, the gradient at the first layer's output. With p held fixed, each move costs a forward and a
    backward of that layer only.

    Args:
        updates: n, moves after each pass.
        layer: name of the module in the network; None: the first convolution or linear layer that is called.
    """

    def __init__(self, updates: int, layer: str | None = None) -> None:
        self.updates, self.layer = check_count(updates, "updates", least=1), layer
        self.share: float | None = None
        """The first layer's share of the operations of a forward pass; known after the first step."""

    @property
    def passes(self) -> float:
        """A forward, a backward to the first layer's output, and both of that layer for each move."""
        return 2 + (2 * self.updates - 1) * (self.share or 0.0)

    def __call__(self, net: nn.Module, images: Tensor, gradient: LogitGradient, move: Move) -> tuple[Tensor, Tensor]:
        """Return the moved ``images`` (n, …) and the logits (n, K) before the step."""
        net = uncompiled(net)
        with self._holding(net) as held:
            logits, whole = self._counted(lambda: forward_some(net, images.detach()))
        if not held:
            raise ValueError("YOPO found no convolution or linear layer that was called; say which with layer=")
        layer, output = held[0]
        (p,) = torch.autograd.grad(logits, output, gradient(logits))
        for _ in range(self.updates):
            at = images.detach().requires_grad_()
            first, part = self._counted(lambda at=at: front(net, layer, at))  # type: ignore[misc]
            (to_input,) = torch.autograd.grad(first, at, p)
            images = move(at.detach(), to_input)
            if self.share is None:
                self.share = part / whole if whole else 0.0
        return images, logits.detach()

    @contextmanager
    def _holding(self, net: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor]]]:
        """Cut the graph at the first layer, and yield that layer and its output, a leaf that requires a gradient."""
        held: list[tuple[nn.Module, Tensor]] = []

        def hold(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if held:
                return None
            held.append((module, output.detach().requires_grad_()))
            return held[0][1]

        layers = _weighty(net) if self.layer is None else [net.get_submodule(self.layer)]
        hooks = [layer.register_forward_hook(hold) for layer in layers]
        # A repeated forward starts again.
        hooks.append(net.register_forward_pre_hook(lambda module, args: held.clear()))
        try:
            yield held
        finally:
            for hook in hooks:
                hook.remove()

    def _counted(self, function: Callable[[], Tensor]) -> tuple[Tensor, float]:
        """Return the result and, until the first layer's share is known, its floating-point operations."""
        if self.share is not None:
            return function(), 0.0
        with _Operations() as operations:  # type: ignore[no-untyped-call]
            result = function()
        return result, operations.count


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations. Torch's own counter adds module hooks that disturb gradients."""

    count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.count += formula(*args, **(kwargs or {}), out_val=out)
        return out


class _ReachedError(Exception):
    """Stops a forward after the first layer."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


def front(net: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    """Return the output of ``layer`` for x (n, …), with its graph, without running the layers after it."""

    def stop(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        raise _ReachedError(output)

    hook = layer.register_forward_hook(stop)
    try:
        net(x)
    except _ReachedError as reached:
        return reached.output
    finally:
        hook.remove()
    raise RuntimeError("the first layer was called before, and is not now; name another one with layer=")


def _weighty(net: nn.Module) -> list[nn.Module]:
    """Return the modules with their own weight matrix or kernel: no norms, no containers."""
    return [module for module in net.modules() if any(p.ndim > 1 for p in module.parameters(recurse=False))]


def yopo_budget(eps: float, passes: int = 2, updates: int = 5) -> StepBudget:
    """Return a budget of ``passes`` for all examples, with the step size of an attack of passes·updates steps."""
    step = StepBudget.uniform(passes * updates).boundary_step(eps)
    return StepBudget.uniform(passes, step_size=step or None)


def yopo(objective: AdversarialObjective, *, passes: int = 2, updates: int = 5) -> BulletTrain:
    """YOPO-m-n: the objective with ``passes`` (m) full passes for all examples and ``updates`` (n) moves after each.

    Args:
        objective: TRADES in the paper; PGDAT and MART work the same.
        passes: m.
        updates: n.
    """
    changed = attacked(objective, Attack(ascent=FirstLayer(updates)))
    return BulletTrain(changed, budget=yopo_budget(objective.unit, passes, updates))
