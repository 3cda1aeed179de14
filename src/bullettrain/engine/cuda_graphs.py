"""A runner that captures each phase as a CUDA graph, once a size, and replays it. It owns all static buffers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bullettrain.brief import first_line

CUDNN_BENCHMARK_AFTER = 60.0
"""Seconds that a size runs before cuDNN benchmarks its convolutions. For an update of WRN-40-2 that takes 3 s and gains
2 %, which pays after two minutes; PreActResNet-18 gained 5 to 9 %."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 0.05}
"""Relative difference that a replay may have from the eager phase; four times as much in low precision. A gradient near
0 may round to either sign, and then moves a pixel the other way."""


class CudaGraphRunner:
    """Runs phases as CUDA graphs that share one memory pool.

    A phase is a function of tensors and of numbers that name a size. It may change a tensor in place if the tensor was
    loaded or returned by another phase. At a new size the phase is run eagerly, as a warm-up, then captured and
    replayed. The replay is compared with the eager result, as is a later one now and then (:meth:`check_next`). If a
    capture fails or a replay differs, all phases run eagerly from then on.

    Args:
        state: returns every tensor that phases change besides their arguments.
        on_message: called with a one-line message when capturing is given up.
        cudnn_benchmark_after: seconds that a graph runs before cuDNN benchmarks its convolutions and it is captured
            again; 0: before the first capture. A value above 0 is for convolutions in low precision.
        slack: allowed difference of replays, in units of :data:`TOLERANCE`.
    """

    def __init__(
        self,
        state: Callable[[], Sequence[Tensor]],
        on_message: Callable[[str], None] = print,
        *,
        cudnn_benchmark_after: float = 0.0,
        slack: float = 1.0,
    ) -> None:
        self.state, self.on_message, self.slack = state, on_message, slack
        self.cudnn_benchmark_after = cudnn_benchmark_after
        self.graphs: dict[Hashable, Any] = {}
        self.seconds = 0.0
        """Time spent on warm-ups and captures, compilation included."""
        self.reason: str | None = None
        """Why capturing was given up; None if it was not."""
        self._calls: dict[Hashable, _Call] = {}
        self._inputs: dict[Hashable, Tensor] = {}
        self._static: dict[int, Tensor] = {}  # tensors that graphs use without a copy, by id
        self._untuned: dict[Hashable, _Untuned] = {}
        self._tried: set[Hashable] = set()  # sizes whose convolutions have been benchmarked
        self._checks = 0
        self._check: str | None = None
        self.pool = self._new_pool()

    def __call__(self, phase: Callable[..., Any], *args: Any) -> Any:
        """Run a phase: replay its graph, or capture one."""
        if self.reason is not None:
            return phase(*args)
        key = (phase.__name__, *(self._describe(arg) for arg in args))
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _Call(phase, [self._own(phase, i, arg) for i, arg in enumerate(args)])
        _copy_into(call.args, args)
        if key not in self.graphs:
            return self._first(key, call)
        if key in self._untuned and self._untuned[key].is_due():
            return self._tune(key, call)
        if self._check is not None and phase.__name__ == self._check:
            self._check = None
            return self._checked(key, call)
        self.graphs[key].replay()
        return call.result

    def load(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Copy tensors that several phases read into static buffers, and return the buffers."""
        if self.reason is not None:
            return tensors
        loaded = [None if t is None else self._buffer("load", i, t) for i, t in enumerate(tensors)]
        _copy_into(loaded, tensors)
        self._static |= {id(own): own for own in loaded if own is not None}
        return tuple(loaded)

    def check_next(self) -> None:
        """Compare one of the next replays with the eager phase; a different kind of phase each time."""
        names = list(dict.fromkeys(key[0] for key in self.graphs))  # type: ignore[index]
        if names:
            self._check = names[self._checks % len(names)]
            self._checks += 1

    def forget(self) -> None:
        """Drop all graphs, because memory that they use has changed."""
        self._synchronize()
        for kept in (self.graphs, self._calls, self._inputs, self._static, self._untuned):
            kept.clear()
        self._tried.clear()
        self.pool = self._new_pool()

    # ------------------------------------------------------------------------------------------- buffers

    def _describe(self, arg: Any) -> Hashable:
        if isinstance(arg, Tensor):
            if id(arg) in self._static:
                return id(arg)
            return tuple(arg.shape), arg.dtype, _is_channels_last(arg)
        return tuple(map(self._describe, arg)) if isinstance(arg, (tuple, list)) else arg

    def _own(self, phase: Callable[..., Any], position: Hashable, arg: Any) -> Any:
        """Return an argument as graphs read it: itself if it is static, else the buffer of its position."""
        if isinstance(arg, (tuple, list)):
            return _like(arg, [self._own(phase, (position, i), part) for i, part in enumerate(arg)])
        if not isinstance(arg, Tensor) or id(arg) in self._static:
            return arg
        return self._buffer(phase.__name__, position, arg)

    def _buffer(self, name: str, position: Hashable, like: Tensor) -> Tensor:
        key = name, position, tuple(like.shape), like.dtype, _is_channels_last(like)
        if key not in self._inputs:
            self._inputs[key] = torch.empty_like(like.detach())
        return self._inputs[key]

    # ------------------------------------------------------------------------------------------ captures

    def _first(self, key: Hashable, call: _Call) -> Any:
        """Capture a phase at a new size, and run it."""
        tried = nullcontext() if self.cudnn_benchmark_after else benchmarked()
        try:
            result = self._make(key, call, tried)
        except _CaptureError as error:
            self._give_up(f"{type(error.cause).__name__}: {first_line(error.cause)}")
            return call.phase(*call.args)
        if self.reason is None and self.cudnn_benchmark_after and key not in self._tried:
            self._untuned[key] = _Untuned(call.seconds, self.cudnn_benchmark_after)
        return result

    def _tune(self, key: Hashable, call: _Call) -> Any:
        """Capture a phase again with benchmarked convolutions, and run it."""
        before = self._untuned.pop(key)
        self._tried.add(key)
        if not _tf32_allowed():  # benchmarking again would have to allow it
            self.graphs[key].replay()
            return call.result
        try:
            result = self._make(key, call, benchmarked(again=True))
        except Exception:  # it could be captured without benchmarking before
            return self._first(key, call)
        if call.seconds > 1.05 * before.seconds:
            del self.graphs[key]  # slower: the next call captures it without benchmarking
        return result

    def _make(self, key: Hashable, call: _Call, choice: AbstractContextManager[None]) -> Any:
        """Capture a phase within ``choice``, the context for convolutions, and run it, compared with eager."""
        began = time.perf_counter()
        seen = any(other[0] == key[0] for other in self.graphs)  # type: ignore[index]
        with choice:
            result = self._checked(key, call, 1 if seen else 2, capture=True)
        for value in call.outputs:
            self._static[id(value)] = value
        self.seconds += time.perf_counter() - began
        return result

    def _checked(self, key: Hashable, call: _Call, times: int = 1, *, capture: bool = False) -> Any:
        """Run a phase eagerly, ``times`` times, then its graph, each from the same state, and compare the results."""
        state = [*self.state(), *_tensors(call.args)]
        was, generator = [t.detach().clone() for t in state], self._generator_state()
        expected: list[Tensor] = []
        for _ in range(times):
            try:
                self._run_aside(call.warm_up)
                expected = [t.detach().clone() for t in (*state, *call.outputs)]
            finally:
                _put(state, was)
                self._set_generator_state(generator)
        if capture:
            try:
                self.graphs[key] = self._capture(call.captured)
            except Exception as error:
                self._free_generator()
                raise _CaptureError(error) from error
            finally:
                self._set_generator_state(generator)
        began = self._now()
        self.graphs[key].replay()
        call.seconds = self._now() - began
        found = [*state, *call.outputs]
        zeros = [torch.zeros_like(t) for t in call.outputs]
        difference = _difference([*was, *zeros], expected, found, len(state))
        if difference > self.slack:
            _put(found, expected)
            name = call.phase.__name__
            self._give_up(f"a replay of {name} differs from eager by {difference:.2g} times what rounding explains")
        return call.result

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self.on_message(f"CUDA graphs are off, steps run one by one: {reason}")

    # ----------------------------------------------------------------------------------------- CUDA

    def _new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def _synchronize(self) -> None:
        torch.cuda.synchronize()

    def _now(self) -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    def _generator_state(self) -> Tensor:
        return torch.cuda.get_rng_state()

    def _set_generator_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def _run_aside(self, function: Callable[[], None]) -> None:
        """Run a function on a side stream, as in a capture."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)

    def _capture(self, function: Callable[[], None]) -> Any:
        graph = torch.cuda.CUDAGraph()
        # Thread-local: a loader's thread may pin memory meanwhile.
        with _no_collection(), torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            function()
        return graph

    def _free_generator(self) -> None:
        """Reset the device's generator, which a failed capture leaves in capture mode."""
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        generator.graphsafe_set_state(fresh.graphsafe_get_state())


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: destroying an old graph, which lies in a reference cycle, would end a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _CaptureError(Exception):
    """A phase runs eagerly, but cannot be captured."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class _Call:
    """A phase with its static arguments and outputs."""

    def __init__(self, phase: Callable[..., Any], args: Sequence[Any]) -> None:
        self.phase, self.args = phase, tuple(args)
        self.outputs: list[Tensor] = []
        self.result: Any = None
        self.seconds = 0.0
        """Duration of a replay."""

    def warm_up(self) -> None:
        """Run the phase; its first results become the static outputs."""
        made = self.phase(*self.args)
        if not self.outputs:
            self.outputs = [value.detach().clone() for value in _tensors(made)]
            self.result = _rebuilt(made, iter(self.outputs))
        else:
            _put(self.outputs, _tensors(made))

    def captured(self) -> None:
        """Run the phase inside a capture."""
        _put(self.outputs, _tensors(self.phase(*self.args)))


@torch.no_grad()
def _put(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors in a phase's arguments or result."""
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in _tensors(value)]
    return [values] if isinstance(values, Tensor) else []


def _rebuilt(made: Any, own: Iterator[Tensor]) -> Any:
    """Return the result of a phase with its tensors replaced by static outputs."""
    if isinstance(made, Tensor):
        return next(own)
    if isinstance(made, tuple):
        return _like(made, [_rebuilt(part, own) for part in made])
    return made


def _like(given: Any, parts: Sequence[Any]) -> Any:
    """Return ``parts`` as a tuple of the type of ``given``."""
    return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)


def _copy_into(own: Sequence[Any], given: Sequence[Any]) -> None:
    for mine, new in zip(own, given, strict=True):
        if isinstance(new, Tensor):
            if mine is not new:
                mine.copy_(new.detach())
        elif isinstance(new, (tuple, list)):
            _copy_into(mine, new)


def _is_channels_last(t: Tensor) -> bool:
    return t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


@torch.no_grad()
def _difference(was: Sequence[Tensor], expected: Sequence[Tensor], found: Sequence[Tensor], changed: int) -> float:
    """Return the difference of ``found`` from ``expected``, relative to the change, in units of the tolerance.

    The first ``changed`` tensors are state. State tensors with several elements are taken together, since the gradients
    of some are nothing but rounding. Integers may differ in as large a part; NaN has to be in the same places.
    """
    far: list[Tensor] = []
    off = total = None
    for i, (old, a, b) in enumerate(zip(was, expected, found, strict=True)):
        if not a.numel():
            continue
        if not a.is_floating_point():
            far.append((a != b).double().mean() / TOLERANCE[torch.float32])
            continue
        far.append((a.isnan() != b.isnan()).any() * 1e30)
        allowed = TOLERANCE.get(a.dtype, TOLERANCE[torch.float32])
        difference, change = (a.double() - b.double()).norm(), (a.double() - old.double()).norm()
        if i < changed and a.numel() > 1:
            off = difference.square() / allowed**2 + (0.0 if off is None else off)
            total = change.square() + (0.0 if total is None else total)
        else:
            far.append(difference / (allowed * change + 1e-12 + 1e-6 * a.double().norm()))
    if off is not None:
        far.append(off.sqrt() / (total.sqrt() + 1e-12))  # type: ignore[union-attr]
    return float(torch.stack(far).nan_to_num(nan=0.0, posinf=1e30).max()) if far else 0.0


class _Untuned:
    """A phase that was captured with cuDNN's heuristic choice of convolutions.

    Args:
        seconds: duration of a replay.
        benchmark_after: seconds that it runs before its convolutions are benchmarked.
    """

    def __init__(self, seconds: float, benchmark_after: float) -> None:
        self.seconds, self.left = seconds, benchmark_after - seconds

    def is_due(self) -> bool:
        """Count one replay, and return whether benchmarking is due."""
        self.left -= self.seconds
        return self.left < 0


@contextmanager
def benchmarked(*, again: bool = False) -> Iterator[None]:
    """Let cuDNN benchmark convolutions and take the fastest.

    This pays for captured sizes only; evaluation in between has ever new sizes. torch caches its first choice for a
    convolution and size, under a key that includes whether TF32 is allowed. ``again`` chooses anew by disallowing TF32
    meanwhile, which has no effect on convolutions in half precision.
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
    """Return whether float32 convolutions may use TF32; False if torch does not tell, as with its newer switches."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return False


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimiser's state, and its learning rates."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return tensors + [group["lr"] for group in optimizer.param_groups if torch.is_tensor(group["lr"])]


def materialize(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of a new optimiser, as zeros, before anything is captured."""
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
