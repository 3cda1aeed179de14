"""Pieces of the group engine as captured CUDA graphs: one a size, in shared memory, replayed without the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

TUNE_AFTER = 60.0
"""Seconds that a size runs before cuDNN tries its convolutions. That takes 3 s for an update of WRN-40-2 and makes
it 2 % faster, so that it pays after two minutes; for PreActResNet-18, which gained 5 to 9 %, sooner."""


class Graphs:
    """A runner that captures each piece at its first use and replays it after.

    Before a capture the piece is run as it is, for what compiles, tunes or allocates at first use (twice for the
    first piece of a kind, once for another size of it); what that changed is put back. A piece that cannot be
    captured is run as it is from then on, as is everything after it.

    Args:
        state: every tensor that pieces change and that has to survive a warm-up.
        say: told in one line why nothing is captured any more.
        tune_after: seconds that a piece runs before cuDNN tries its convolutions for it, and it is captured anew;
            0: they are tried before the first capture. More than 0 is for convolutions in half precision.
    """

    def __init__(
        self, state: Callable[[], Sequence[Tensor]], say: Callable[[str], None] = print, *, tune_after: float = 0.0
    ) -> None:
        self.state, self.say, self.tune_after = state, say, tune_after
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.untuned: dict[Hashable, _Untuned] = {}
        """Those of ``graphs`` whose convolutions have not been tried."""
        self.tried: set[Hashable] = set()
        """Those for which they have been tried, whatever came of it."""
        self.seconds = 0.0
        """Spent on warm-ups and captures, compilation included."""
        self.reason: str | None = None
        """Why capturing was given up, if it was."""
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, key: Hashable, function: Callable[[], None]) -> None:
        """Run a piece: replay its graph, or make one."""
        if self.reason is not None:
            function()
        elif key not in self.graphs:
            self._first(key, function)
        elif key in self.untuned and self.untuned[key].is_due():
            self._tune(key, function)
        else:
            self.graphs[key].replay()

    def _first(self, key: Hashable, function: Callable[[], None]) -> None:
        """Capture a piece, and run it."""
        try:
            self._make(key, function, nullcontext() if self.tune_after else tuned())
        except Exception as error:
            self.reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self.say(f"CUDA graphs are off, steps run one by one: {self.reason}")
            function()
            return
        if self.tune_after and key not in self.tried:
            self.untuned[key] = _Untuned(_timed(self.graphs[key]), self.tune_after)
        else:
            self.graphs[key].replay()

    def _tune(self, key: Hashable, function: Callable[[], None]) -> None:
        """Capture a piece once more, with its convolutions tried, and run it."""
        before = self.untuned.pop(key)
        self.tried.add(key)
        if not _tf32_allowed():  # then they cannot be chosen anew without allowing it
            self.graphs[key].replay()
            return
        try:
            self._make(key, function, tuned(again=True))
        except Exception:  # by guess it could be captured, and may be again
            self._first(key, function)
            return
        if _timed(self.graphs[key]) > 1.05 * before.seconds:
            del self.graphs[key]  # by guess again when it is asked for next: a piece's outputs are its last capture's

    def _make(self, key: Hashable, function: Callable[[], None], choice: AbstractContextManager[None]) -> None:
        """Capture a piece with convolutions of ``choice``."""
        began = time.perf_counter()
        try:
            with choice:
                self.graphs[key] = self._capture(function, warm_ups=1 if self._seen(key) else 2)
        except Exception:
            _free_generator()
            raise
        self.seconds += time.perf_counter() - began

    def reset(self) -> None:
        """Forget every graph: the buffers have changed."""
        torch.cuda.synchronize()
        self.graphs.clear()
        self.untuned.clear()
        self.tried.clear()
        self.pool = torch.cuda.graph_pool_handle()

    def _seen(self, key: Hashable) -> bool:
        """Whether a piece of this kind has been captured before, in another size."""
        return any(_kind(other) == _kind(key) for other in self.graphs)

    def _capture(self, function: Callable[[], None], warm_ups: int) -> torch.cuda.CUDAGraph:
        state = self.state()
        saved = [tensor.detach().clone() for tensor in state]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        for _ in range(warm_ups):
            try:
                with torch.cuda.stream(stream):
                    function()
                torch.cuda.current_stream().wait_stream(stream)
            finally:
                with torch.no_grad():
                    for tensor, value in zip(state, saved, strict=True):
                        tensor.copy_(value)
            stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: others may pin memory meanwhile, as a loader's does.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            function()
        return graph


class _Untuned:
    """A piece that was captured with the convolutions that cuDNN would guess to be the fastest.

    Args:
        seconds: that it takes.
        tune_after: seconds that it is to run in all, before they are tried.
    """

    def __init__(self, seconds: float, tune_after: float) -> None:
        self.seconds, self.left = seconds, tune_after - seconds

    def is_due(self) -> bool:
        """Whether it has run for long enough; asked each time before it is run."""
        self.left -= self.seconds
        return self.left < 0


def _timed(graph: torch.cuda.CUDAGraph) -> float:
    """Replay a graph, wait for it, and tell the seconds."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - began


@contextmanager
def tuned(*, again: bool = False) -> Iterator[None]:
    """cuDNN tries its convolutions and takes the fastest.

    That pays for a size that is captured and comes again, and for nothing else: images that are judged in between come
    in ever new sizes. torch keeps what was chosen first for a convolution and its size, tried or not, under a key in
    which whether TF32 is allowed has a part. ``again``: chosen once more, with that forbidden meanwhile, which means
    nothing to convolutions in half precision.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    cudnn.benchmark = True
    if again:
        cudnn.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.benchmark = before
        if again:
            cudnn.allow_tf32 = True


def _tf32_allowed() -> bool:
    """Whether convolutions in single precision may use TF32; no where torch does not say, as with newer switches."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return False


def _kind(key: Hashable) -> Hashable:
    return key[0] if isinstance(key, tuple) else key


def _free_generator() -> None:
    """A capture that broke off leaves the device's generator waiting for its end: give it a state of its own."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimiser's state, and its rates."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return tensors + [group["lr"] for group in optimizer.param_groups if torch.is_tensor(group["lr"])]


def materialize(optimizer: torch.optim.Optimizer) -> None:
    """Give a new optimiser its state before anything is captured, as it is before the first step: zeros."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p in optimizer.state and optimizer.state[p] for p in parameters):
        return
    saved = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    with torch.no_grad():
        for p, value in zip(parameters, saved, strict=True):
            p.copy_(value)
            p.grad = None
            for tensor in optimizer.state[p].values():
                if torch.is_tensor(tensor):
                    tensor.zero_()
