"""How phases run the network: directly, or by a frozen copy and a paired forward, in low precision and compiled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bullettrain.attacks.state import Mode, bare, dynamic, forward_some, frozen, training, without_sync
from bullettrain.engine.frozen_copy import FrozenCopy
from bullettrain.engine.paired_forward import PairedForward
from bullettrain.validation import check_logits_shape

TRIAL_IMAGES = 16
"""Images of the trial whether two batches can be paired, which runs in double precision."""


class Forwards:
    """Plain forwards of the module itself. `FastForwards` is tested against them.

    Args:
        model: may be compiled, or wrapped in DistributedDataParallel.
        dtype: autocast dtype of its forwards; None: the caller's autocast applies.
    """

    pads = False
    """Whether filling rows have no effect in a training-mode forward."""
    keeps_graphs = True
    """Whether a later phase may use the autograd graph of a forward."""
    seconds = 0.0
    """Time spent in :meth:`prepare`, compilation included."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        self.model, self.network, self.dtype = model, bare(model), dtype
        self.statistics: list[Tensor] | None = None
        """Buffers that attacks of a group see: those after its clean forwards; None: the network's own."""

    def prepare(self, x: Tensor) -> None:
        """Prepare for batches like ``x``."""

    def freeze(self) -> None:
        """Use the present weights for attacks and for selection in eval mode from now on."""
        self.statistics = None

    def frozen_logits(self, x: Tensor, mode: Mode = "eval") -> Tensor:
        """Return logits (n, K) of the frozen network, without gradients."""
        with self._frozen(mode), torch.no_grad(), self.autocast():
            logits = forward_some(self.network, x)
        check_logits_shape(logits, len(x))
        return logits

    @contextmanager
    def attacked(self, mode: Mode) -> Iterator[nn.Module]:
        """Yield the frozen network, with gradients enabled for its input."""
        with self._frozen(mode), torch.enable_grad(), self.autocast():
            yield self.network

    @contextmanager
    def _frozen(self, mode: Mode) -> Iterator[None]:
        """Freeze the network, with the statistics that attacks see."""
        with frozen(self.network, mode), torch.no_grad():
            if self.statistics is None or mode == "train":
                yield
                return
            buffers = list(self.network.buffers())
            own = [buffer.clone() for buffer in buffers]
            _copy(self.statistics, buffers)
            try:
                yield
            finally:
                _copy(own, buffers)

    def learning_logits(
        self, clean: Tensor | None, corrupted: Tensor, z: Tensor | None, valid: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return training-mode logits of the clean and of the corrupted batch; None for a missing or empty batch.

        Args:
            clean: (m, …) clean batch, or None.
            corrupted: (n, …) corrupted batch.
            z: logits of the clean batch, if they exist already.
            valid: (n,) False for corrupted rows that only fill up the size.
        """
        with self.autocast():
            if clean is not None:
                z = forward(self.model, clean)
            # DistributedDataParallel has seen the first forward, and synchronises the gradients of both.
            if z is None:
                return None, forward(self.model, corrupted)
            with without_sync(self.network):
                return z, forward(self.network, corrupted) if len(corrupted) else None

    def clean_logits(self, x: Tensor) -> Tensor:
        """Return training-mode logits (m, K) of the loss, with their graph."""
        self.statistics = None
        with self.autocast():
            return forward(self.model, x)

    def logits_of_each(self, batches: Sequence[Tensor]) -> Tensor:
        """Return training-mode logits of several batches, each with its own statistics, without gradients.

        The network is frozen with the running statistics after these forwards, as an attack would see them; then the
        statistics are restored.
        """
        buffers = list(self.network.buffers())
        before = [buffer.clone() for buffer in buffers]
        logits = [self._one(batch) for batch in batches]
        self.freeze()
        if self.keeps_graphs:  # else the copy keeps them
            self.statistics = [buffer.clone() for buffer in buffers]
        _copy(before, buffers)
        return torch.cat(logits)

    def _one(self, batch: Tensor) -> Tensor:
        with torch.no_grad(), self.autocast():
            return forward(self.network, batch)

    def collect_gradients(self) -> None:
        """Move gradients of copied weights to the network's own weights, after a backward."""

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the function, compiled if the network is."""
        return function

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of forwards."""
        device = next(self.network.parameters(), torch.empty(0)).device.type
        if self.dtype is None:
            return torch.autocast(device, enabled=torch.is_autocast_enabled(device))
        return torch.autocast(device, self.dtype)


class FastForwards(Forwards):
    """Forwards by a frozen copy for attacks, and one paired forward for both batches of an update.

    Args:
        network: the bare module.
        dtype: precision of convolutions and linear layers; None: that of the weights.
        compile: compile the network, once for all sizes.
        pair: run the clean and the corrupted batch in one forward, each with its own batch-norm statistics, if the
            network allows it.
        freezes: whether a frozen copy is needed.
        on_message: called with a one-line message if something cannot be compiled.
    """

    keeps_graphs = False

    def __init__(
        self,
        network: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        compile: bool = False,
        pair: bool = True,
        freezes: bool = True,
        on_message: Callable[[str], None] = print,
    ) -> None:
        super().__init__(network, dtype)
        self.compile, self.wants_pair, self.on_message = compile, pair, on_message
        self.learner: nn.Module = _compiled(network) if compile else network
        self.copy: FrozenCopy | None = None
        self.paired: PairedForward | None = None
        self._prepared = False
        if freezes:
            self._take(FrozenCopy(network, dtype))

    @property
    def pads(self) -> bool:  # type: ignore[override]
        """Whether filling rows have no effect: paired batch norms leave them out, other layers treat rows alone."""
        return self.paired is not None or not any(isinstance(m, _BatchNorm) for m in self.network.modules())

    def prepare(self, x: Tensor) -> None:
        """Try on a first batch whether batch norms can be folded and whether two batches can be paired."""
        if self._prepared:
            return
        began = time.perf_counter()
        if self.compile and self.copy is not None and FrozenCopy.folds(self.network, x):
            self._take(FrozenCopy(self.network, self.dtype, folded=True))
        if self.wants_pair and PairedForward.suits(self.network, x[:TRIAL_IMAGES]):
            with training(self.network):  # the copy keeps these modes
                self.paired = PairedForward(self.network, self.dtype)
            if self.compile:
                self._compile_pair(self.paired, x)
        self._prepared = True
        self.seconds += time.perf_counter() - began

    def _take(self, frozen_copy: FrozenCopy) -> None:
        self.copy = frozen_copy
        self.frozen: nn.Module = _compiled(frozen_copy) if self.compile else frozen_copy

    def _compile_pair(self, paired: PairedForward, x: Tensor) -> None:
        """Compile the paired forward, unless that changes its gradients."""
        # Splitting would make two kernels of each sum over a few hundred rows.
        paired.compile(options={"split_reductions": False})
        with training(self.network):
            error = paired.gradient_error(dynamic(x.detach()))
        if error > 1:
            paired.run = paired.inner
            what = f"differ by {error:.2g} times what rounding explains" if math.isfinite(error) else "are lost"
            self.on_message(
                "updates are not compiled, and take several times as long: compiled by torch "
                f"{torch.__version__}, gradients of this network {what}"
            )

    def freeze(self) -> None:
        """Copy the present weights and statistics."""
        if self.copy is not None:
            self.copy.refresh()

    def frozen_logits(self, x: Tensor, mode: Mode = "eval") -> Tensor:
        """Return logits (n, K) of the copy, run like an attack's forward so that only one version is compiled."""
        if mode == "train" or self.copy is None:
            return super().frozen_logits(x, mode)
        with torch.enable_grad():
            logits: Tensor = self.frozen(dynamic(x.detach().requires_grad_(self.compile)))
        return logits.detach()

    @contextmanager
    def attacked(self, mode: Mode) -> Iterator[nn.Module]:
        """Yield the copy; in training mode the network itself."""
        if mode == "train" or self.copy is None:
            with super().attacked(mode) as network:
                yield network
            return
        with torch.enable_grad():
            yield self.frozen

    def learning_logits(
        self, clean: Tensor | None, corrupted: Tensor, z: Tensor | None, valid: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the same logits, from one forward if the network can be paired."""
        sizes = [len(x) for x in (clean, corrupted) if x is not None]
        if self.paired is None or z is not None or 1 in sizes:  # a lone example has no statistics
            with self.autocast():
                if clean is not None:
                    z = forward(self.learner, dynamic(clean))
                return z, forward(self.learner, dynamic(corrupted)) if len(corrupted) else None
        if clean is None:
            return None, self._pair(corrupted, len(corrupted), None)
        # Concatenating an empty part would lose the memory format.
        both = torch.cat([clean, corrupted]) if len(corrupted) else clean
        if valid is not None:
            valid = torch.cat([torch.ones(len(clean), dtype=torch.bool, device=valid.device), valid])
        logits = self._pair(both, len(clean), valid)
        return logits[: len(clean)], logits[len(clean) :] if len(corrupted) else None

    def _pair(self, x: Tensor, count: int, valid: Tensor | None) -> Tensor:
        assert self.paired is not None
        valid = torch.ones(len(x), dtype=torch.bool, device=x.device) if valid is None else valid
        self.paired.prepare(count)
        with training(self.network):
            logits: Tensor = self.paired(dynamic(x), dynamic(valid))
        return logits

    def _one(self, batch: Tensor) -> Tensor:
        if self.paired is None or len(batch) == 1:
            return super()._one(batch)
        return self._pair(batch, len(batch), None).detach()

    def collect_gradients(self) -> None:
        """Move the gradients of the paired copy to the network's weights."""
        if self.paired is not None:
            self.paired.give_back()

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the function, compiled for batches of any size if the network is compiled."""
        if not self.compile:
            return function
        program = torch.compile(function)

        def marked(*args: Tensor | None) -> Tensor:
            for value in args:
                if torch.is_tensor(value) and value.ndim:
                    dynamic(value)
            return program(*args)

        return marked


@torch.no_grad()
def _copy(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def forward(model: nn.Module, x: Tensor) -> Tensor:
    """Return training-mode logits (n, K), with their shape checked."""
    with training(model):
        logits = forward_some(model, x)
    check_logits_shape(logits, len(x))
    return logits


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module)  # type: ignore[return-value]


def in_any_size(module: nn.Module) -> nn.Module:
    """Return the module compiled for batches of any size."""
    return torch.compile(module, dynamic=True)  # type: ignore[return-value]
