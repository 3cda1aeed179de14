"""How phases run the network: as it is, or by a frozen copy and a paired forward, in low precision and compiled."""

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
"""Images that show whether two batches can be paired; in double precision many would take seconds."""


class Forwards:
    """The network as it is: each forward by the module itself. What fast ones are checked against.

    Args:
        model: may be compiled, or wrapped in DistributedDataParallel.
        dtype: of autocast around its forwards; None: as the caller has it.
    """

    pads = False
    """Whether rows that fill a size up change nothing in a training-mode forward."""
    keeps_graphs = True
    """Whether a forward's graph may be used by a later phase."""
    seconds = 0.0
    """Spent on what a first batch shows, and on compiling for it."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        self.model, self.network, self.dtype = model, bare(model), dtype

    def prepare(self, x: Tensor) -> None:
        """Look at a first batch."""

    def freeze(self) -> None:
        """From now on the network as it is now is attacked, and selects in eval mode."""

    def frozen_logits(self, x: Tensor, mode: Mode = "eval") -> Tensor:
        """(n, K) of the frozen network, without gradients."""
        with frozen(self.network, mode), torch.no_grad(), self.autocast():
            logits: Tensor = self.network(x)
        check_logits_shape(logits, len(x))
        return logits

    @contextmanager
    def attacked(self, mode: Mode) -> Iterator[nn.Module]:
        """The frozen network, with gradients for its input."""
        with frozen(self.network, mode), torch.enable_grad(), self.autocast():
            yield self.network

    def learning_logits(
        self, clean: Tensor | None, corrupted: Tensor, z: Tensor | None, valid: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Training-mode logits of the clean and of the corrupted batch: None for one that is not there, or is empty.

        Args:
            clean: (m, …), or None.
            corrupted: (n, …).
            z: logits of the clean batch, where they are there already.
            valid: (n,) which corrupted rows are more than filling.
        """
        with self.autocast():
            if clean is not None:
                z = forward(self.model, clean)
            # A wrapper for several processes has seen this step's first forward, and syncs gradients of both.
            if z is None:
                return None, forward(self.model, corrupted)
            with without_sync(self.network):
                return z, forward(self.network, corrupted) if len(corrupted) else None

    def clean_logits(self, x: Tensor) -> Tensor:
        """(m, K) of the loss, with their graph."""
        with self.autocast():
            return forward(self.model, x)

    def logits_of_each(self, batches: Sequence[Tensor]) -> Tensor:
        """Training-mode logits of several batches, each by its own statistics, without gradients.

        The network is frozen with the statistics after these forwards, as an attack would see them; then those are put
        back.
        """
        before = [buffer.clone() for buffer in self.network.buffers()]
        logits = [self._one(batch) for batch in batches]
        self.freeze()
        with torch.no_grad():
            for buffer, value in zip(self.network.buffers(), before, strict=True):
                buffer.copy_(value)
        return torch.cat(logits)

    def _one(self, batch: Tensor) -> Tensor:
        with torch.no_grad(), self.autocast():
            return forward(self.network, batch)

    def collect_gradients(self) -> None:
        """After a backward: every gradient to the network's own weights."""

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function of tensors, faster where that can be had."""
        return function

    def autocast(self) -> AbstractContextManager[object]:
        """Low precision, where that was asked for."""
        device = next(self.network.parameters(), torch.empty(0)).device.type
        if self.dtype is None:
            return torch.autocast(device, enabled=torch.is_autocast_enabled(device))
        return torch.autocast(device, self.dtype)


class FastForwards(Forwards):
    """A frozen copy for attacks, and one forward for the clean and the corrupted batch of an update.

    Args:
        network: the bare module; its weights change.
        dtype: precision of its convolutions and linear layers; None: its own.
        compile: compile it, once for all sizes.
        pair: the clean and the corrupted batch in one forward, each with batch-norm statistics of its own, where the
            network allows it.
        freezes: whether a frozen copy is needed at all.
        say: told in one line what cannot be compiled.
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
        say: Callable[[str], None] = print,
    ) -> None:
        super().__init__(network, dtype)
        self.compile, self.wants_pair, self.say = compile, pair, say
        self.learner: nn.Module = _compiled(network) if compile else network
        self.copy: FrozenCopy | None = None
        self.paired: PairedForward | None = None
        self._prepared = False
        if freezes:
            self._take(FrozenCopy(network, dtype))

    @property
    def pads(self) -> bool:  # type: ignore[override]
        """Whether rows that fill a size up change nothing: paired norms leave them out, other layers do not look."""
        return self.paired is not None or not any(isinstance(m, _BatchNorm) for m in self.network.modules())

    def prepare(self, x: Tensor) -> None:
        """See by a first batch how short a program the compiler can be given, and whether two batches can be paired."""
        if self._prepared:
            return
        began = time.perf_counter()
        if self.compile and self.copy is not None and FrozenCopy.folds(self.network, x):
            self._take(FrozenCopy(self.network, self.dtype, folded=True))
        if self.wants_pair and PairedForward.suits(self.network, x[:TRIAL_IMAGES]):
            with training(self.network):  # its parts keep these modes
                self.paired = PairedForward(self.network, self.dtype)
            if self.compile:
                self._compile_pair(self.paired, x)
        self._prepared = True
        self.seconds += time.perf_counter() - began

    def _take(self, frozen_copy: FrozenCopy) -> None:
        self.copy = frozen_copy
        self.frozen: nn.Module = _compiled(frozen_copy) if self.compile else frozen_copy

    def _compile_pair(self, paired: PairedForward, x: Tensor) -> None:
        """Compile it, and leave that if it changes gradients."""
        # Without splitting: it makes two kernels of each sum over a few hundred rows.
        paired.compile(options={"split_reductions": False})
        with training(self.network):
            error = paired.gradient_error(dynamic(x.detach()))
        if error > 1:
            paired.run = paired.inner
            what = f"differ by {error:.2g} times what rounding explains" if math.isfinite(error) else "are lost"
            self.say(
                "updates are not compiled, and take several times as long: compiled by torch "
                f"{torch.__version__}, gradients of this network {what}"
            )

    def freeze(self) -> None:
        """The copy gets the weights and statistics of now."""
        if self.copy is not None:
            self.copy.refresh()

    def frozen_logits(self, x: Tensor, mode: Mode = "eval") -> Tensor:
        """(n, K) of the copy; run like an attack's forward, so that no second version has to be compiled."""
        if mode == "train" or self.copy is None:
            return super().frozen_logits(x, mode)
        with torch.enable_grad():
            logits: Tensor = self.frozen(dynamic(x.detach().requires_grad_(self.compile)))
        return logits.detach()

    @contextmanager
    def attacked(self, mode: Mode) -> Iterator[nn.Module]:
        """The copy; in training mode the network itself."""
        if mode == "train" or self.copy is None:
            with super().attacked(mode) as network:
                yield network
            return
        with torch.enable_grad():
            yield self.frozen

    def learning_logits(
        self, clean: Tensor | None, corrupted: Tensor, z: Tensor | None, valid: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """As of the network itself, in one forward where it can be paired."""
        sizes = [len(x) for x in (clean, corrupted) if x is not None]
        if self.paired is None or z is not None or 1 in sizes:  # a lone example has no statistics
            with self.autocast():
                if clean is not None:
                    z = forward(self.learner, dynamic(clean))
                return z, forward(self.learner, dynamic(corrupted)) if len(corrupted) else None
        if clean is None:
            return None, self._pair(corrupted, len(corrupted), None)
        # An empty part would take channels_last from the whole, for which nothing is compiled.
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
        """Those of the pair's copies, to the network's weights."""
        if self.paired is not None:
            self.paired.give_back()

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The function compiled for batches of any size, where the network is."""
        if not self.compile:
            return function
        program = torch.compile(function)

        def marked(*args: Tensor | None) -> Tensor:
            for value in args:
                if torch.is_tensor(value) and value.ndim:
                    dynamic(value)
            return program(*args)

        return marked


def forward(model: nn.Module, x: Tensor) -> Tensor:
    """Training-mode logits (n, K); their shape is checked."""
    with training(model):
        logits = forward_some(model, x)
    check_logits_shape(logits, len(x))
    return logits


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module)  # type: ignore[return-value]


def in_any_size(module: nn.Module) -> nn.Module:
    """The module compiled for steps whose batches shrink."""
    return torch.compile(module, dynamic=True)  # type: ignore[return-value]
