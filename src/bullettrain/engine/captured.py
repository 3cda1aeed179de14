"""Fast training steps for your own loop: loss and gradients, captured as CUDA graphs on a GPU."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bullettrain.attacks.state import bare
from bullettrain.brief import first_line
from bullettrain.engine.cuda_graphs import CUDNN_BENCHMARK_AFTER, CudaGraphRunner
from bullettrain.engine.distributed import average_gradients, find_group, share
from bullettrain.engine.forwards import FastForwards, Forwards, in_any_size
from bullettrain.engine.phases import EAGER, Batch, Phases, Runner
from bullettrain.validation import check_count, check_logits, check_module

if TYPE_CHECKING:
    from bullettrain.step import BulletTrain, StepOutput

MAX_EARLY_RECAPTURES = 3
"""Maximum early recaptures before falling back to eager."""
EARLY_STEPS = 50
"""Steps after a capture within which another one is early."""


class Captured:
    """Run the steps of a `BulletTrain` as CUDA graphs: on a GPU a plain step mostly waits for kernel launches.

        train = BulletTrain(TRADES(beta=6.0, eps=8/255), budget=StepBudget(boundary=10, robust=2), gamma=0.8)
        fast = Captured(train, model, dtype=torch.bfloat16, compile=True)
        for x, y in loader:
            out = fast.step(x, y)  # computes the gradients; out.loss carries no graph, and needs no backward()
            optimizer.step()

    Optimiser, scheduler, clipping and weight averages stay in your loop. Each step overwrites all gradients, so no
    ``zero_grad()`` is needed; ``accumulate=True`` adds to them. The first steps compile and capture, for seconds to
    minutes. Objectives, allocations, scores and separations of your own are captured like the built-in ones.

    Replays are compared with eager execution. If they differ, for example because a part keeps a counter in Python,
    steps continue eagerly and a warning says why. ``train`` keeps F_R and its ``state_dict()``, and checks values every
    ``check_every`` steps. Without a GPU the steps are the plain ones, compiled if you ask for that. If a process group
    is initialised, all processes get the weights of the first one before the first step, and gradients are averaged.

    Args:
        train: the method.
        model: the network, on its device; neither wrapped nor compiled.
        dtype: precision of convolutions and linear layers, e.g. torch.bfloat16, as with autocast. Weights and gradients
            keep their precision. None: that of the weights.
        compile: compile the network, once for all batch sizes.
        attack_group: number of mini-batches that :meth:`steps` attacks together; 1 is the paper.
        size_multiple: sizes are rounded up to a multiple of this by idle places, which changes nobody's steps. 1
            captures every size.
        pair: run the clean and the corrupted examples of an update in one forward, if the network allows it.
        cudnn_benchmark_after: seconds that a size runs before cuDNN benchmarks its convolutions; 0: at once.
        capture: False disables capturing.
        on_message: called with a one-line message when a feature is not available; None: a warning is issued.
        record: called inside a captured phase with the results of each mini-batch.
    """

    def __init__(
        self,
        train: BulletTrain,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        compile: bool = False,
        attack_group: int = 1,
        size_multiple: int = 8,
        pair: bool = True,
        cudnn_benchmark_after: float = CUDNN_BENCHMARK_AFTER,
        capture: bool = True,
        on_message: Callable[[str], None] | None = None,
        record: Callable[..., None] | None = None,
    ) -> None:
        if not hasattr(train, "robust_fraction"):
            raise TypeError(f"train is {type(train).__name__}; give a BulletTrain")
        check_module(model)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype is {dtype!r}; give a floating-point torch.dtype, e.g. torch.bfloat16, or None")
        if bare(model) is not model or isinstance(model, nn.DataParallel):
            raise ValueError("the model is wrapped for several devices; give the network itself")
        if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
            raise ValueError("the model is compiled already; give the network itself, and compile=True")
        self.train, self.model, self.dtype, self.compile = train, model, dtype, compile
        self.attack_group = check_count(attack_group, "attack_group", least=1)
        self.size_multiple = check_count(size_multiple, "size_multiple", least=1)
        self.pair, self.cudnn_benchmark_after, self.record, self.capture = pair, cudnn_benchmark_after, record, capture
        # The warning points at the line that takes the step.
        self.on_message = on_message or (lambda text: warnings.warn(text, stacklevel=7))
        self.reason: str | None = None
        """Why steps are not captured; None if they are. Known after the first step."""
        self._failed: str | None = None  # why the present settings cannot be captured
        self.runner: Runner = EAGER
        self.gradients = Gradients(model)
        self.more_state: Callable[[], Sequence[Tensor]] = list
        """Returns further tensors that ``record`` and the caller's own phases change."""
        self._phases: Phases | None = None
        self._made_for: object = None
        self._early_recaptures, self._steps_since_capture = 0, EARLY_STEPS
        self._calls = 0
        self._seconds_before = 0.0  # on phases that were made anew since
        self._eager_model: nn.Module = in_any_size(model) if compile else model

    def step(
        self,
        x: Tensor,
        y: Tensor,
        *,
        start: Tensor | None = None,
        index: Tensor | None = None,
        accumulate: bool = False,
        scale: float = 1.0,
    ) -> StepOutput:
        """Compute loss and gradients of one mini-batch and update F_R. Arguments as for `BulletTrain.step`, and:

        Args:
            accumulate: add to the gradients of earlier steps instead of overwriting them.
            scale: factor of the gradients, e.g. 1 over the number of accumulated steps.
        """
        (out,) = self._steps([Batch(x, y, start, index)], (accumulate, scale))
        return out

    def steps(self, batches: Iterable[tuple[Tensor, ...]]) -> Iterator[StepOutput]:
        """Take the steps of up to ``attack_group`` mini-batches, (x, y) or (x, y, index), attacked together.

            for out in fast.steps(batches):
                optimizer.step()  # with this mini-batch's gradients

        Update the weights in every iteration: the next step overwrites the gradients.
        """
        group = self.attack_group
        given = list(itertools.islice(batches, group + 1))  # one too many is enough to know
        if len(given) > group:
            few = f"list(itertools.islice(batches, {group})) of batches = iter(loader)"
            raise ValueError(f"more mini-batches were given at once than attack_group={group}; give e.g. {few}")
        wanted = 3 if self.train.history.examples else 2
        if other := [len(parts) for parts in given if len(parts) != wanted]:
            what = "x, y and index" if wanted == 3 else "x and y"
            raise ValueError(f"a mini-batch is {what} here; one with {other[0]} parts was given")
        return self._steps([Batch(x, y, None, *index) for x, y, *index in given])

    @property
    def seconds(self) -> float:
        """Time spent on compiling and capturing."""
        now = 0.0 if self._phases is None else self._phases.forwards.seconds
        return self._seconds_before + now + (self.runner.seconds if isinstance(self.runner, CudaGraphRunner) else 0.0)

    # ---------------------------------------------------------------------------------------------- steps

    def _steps(self, batches: Sequence[Batch], accumulation: tuple[bool, float] = (False, 1.0)) -> Iterator[StepOutput]:
        for out in self.updates(batches, accumulation):
            yield out.clone()

    def updates(
        self, batches: Sequence[Batch], accumulation: tuple[bool, float] = (False, 1.0)
    ) -> Iterator[StepOutput]:
        """Yield the output of each mini-batch; its tensors are valid until the next one.

        Args:
            batches: mini-batches that are attacked together.
            accumulation: whether gradients are added to the existing ones, and their scale.
        """
        train, draw = self.train, self.train.objective.initial_perturbation
        self._check_surroundings(batches)
        if not batches:
            return
        with train.validated(self.model, batches):
            batches = [b if b.start is not None else b._replace(start=draw(b.x)) for b in batches]
            phases = self._phases_for(batches[0].x)
            phases.accumulation = accumulation
            self._calls += 1
            this_call = self._calls
            if train.checking and isinstance(self.runner, CudaGraphRunner):
                self.runner.check_next()
            group = find_group(train.group, joint=True)  # weights are shared, also if the batch is not joint
            weights = self.model.parameters() if this_call == 1 else ()
            share([*weights, *self.model.buffers()], group)
            self.gradients.prepare(accumulate=accumulation[0])
            together = [[batch] for batch in batches] if train.objective.one_by_one else [batches]
            outs = itertools.chain.from_iterable(train.updates(phases, part, self.runner) for part in together)
            for batch in batches:
                with nullcontext() if self.reason is None else train.checked_forwards(self._eager_model, batch.y):
                    out = next(outs)
                if train.checking:
                    check_logits(out.z_prime, batch.y, train.steps_taken)
                self.gradients.assign()
                average_gradients(self.gradients.existing(), group)
                yield out
                if this_call != self._calls:
                    raise RuntimeError("another step was taken before these were; finish a group before the next")

    def _check_surroundings(self, batches: Sequence[Batch]) -> None:
        """Refuse contexts that a captured step does not support."""
        if any(torch.is_tensor(b.x) and torch.is_autocast_enabled(b.x.device.type) for b in batches):
            raise ValueError("autocast is enabled around a captured step; disable it, and give dtype=torch.bfloat16")

    # ----------------------------------------------------------------------------------- phases and runner

    def _phases_for(self, x: Tensor) -> Phases:
        """Return the phases for the current network, settings and image shape; made anew if any of them changed."""
        changed = self._phases is None or self._signature(x) != self._made_for
        gave_up = self._failed is not None and self.runner is not EAGER
        if changed:
            early = self._steps_since_capture < EARLY_STEPS
            self._early_recaptures = self._early_recaptures + 1 if early else 0
            self._failed = None
        if changed or gave_up:
            self._seconds_before, self._phases = self.seconds, None
            if self.runner is not EAGER:
                self.runner = EAGER
                gc.collect()  # graphs hold memory, in reference cycles
            self._phases = self._make(x)
            self._made_for, self._steps_since_capture = self._signature(x), 0
        self._steps_since_capture += 1
        assert self._phases is not None
        return self._phases

    def _make(self, x: Tensor) -> Phases:
        forwards, reason = Forwards(self._eager_model, self.dtype), self._why_not_captured(x)
        if reason is None:
            try:
                forwards = self._fast_forwards()
            except RuntimeError as error:  # e.g. of a pruned network
                reason = self._failed = f"the network cannot be copied: {first_line(error)}"
        grouped, one_by_one = self.attack_group > 1, self.train.objective.one_by_one
        if reason is not None and reason != self.reason and self.capture:
            self.on_message(f"CUDA graphs are off{'' if grouped else ', steps run one by one'}: {reason}")
        if grouped and one_by_one and self._made_for is None:
            self.on_message("mini-batches are attacked one by one: this objective's attack and update share state")
        self.reason = reason
        fast = reason is None
        self.gradients.rebuild(keep_buffers=fast)
        if fast:
            forwards.prepare(x)
            self.runner = self._make_runner()
        gradients = self.gradients
        return Phases(
            self.train,
            forwards,
            backward=lambda loss, accumulation: gradients.backward(loss, forwards, *accumulation),
            record=self.record,
            packs=fast,
            size_multiple=self.size_multiple if fast else 1,
        )

    def _fast_forwards(self) -> FastForwards:
        train, objective = self.train, self.train.objective
        return FastForwards(
            self.model,
            dtype=self.dtype,
            compile=self.compile,
            pair=self._pairs(),
            freezes=(objective.needs_network and objective.attack_mode == "eval")
            or (train.needs_selection and objective.selection == "eval"),
            on_message=self.on_message,
        )

    def _pairs(self) -> bool:
        return self.pair and self.compile  # uncompiled, its norms are several kernels instead of one

    def _make_runner(self) -> Runner:
        low = self.dtype is not None
        return CudaGraphRunner(
            self._state,
            self._given_up,
            cudnn_benchmark_after=self.cudnn_benchmark_after if low else 0.0,
            slack=4.0 if low else 1.0,
        )

    def _why_not_captured(self, x: Tensor) -> str | None:
        if not self.capture:
            return "capture is False"
        if self._failed:
            return self._failed
        if self._early_recaptures >= MAX_EARLY_RECAPTURES:
            return "settings, shapes, modes or the memory of weights keep changing"
        if not _on_gpu(x):
            return "there is no CUDA device"
        if x.is_cuda and x.device.index != torch.cuda.current_device():
            return f"{x.device} is not the current device; call torch.cuda.set_device first"
        return None

    def _given_up(self, line: str) -> None:
        """Note that a capture failed or a replay differed: this step continues eagerly, later ones are plain."""
        self.reason = self._failed = line.partition(": ")[2]
        self.on_message(line)

    def _state(self) -> list[Tensor]:
        """Return all tensors that phases change."""
        train, network = self.train, [*self.model.parameters(), *self.model.buffers()]
        kept = [train.robust_fraction.live, *(train.history.tensors() if train.history.examples else [])]
        mutable = train.objective.mutable_state(self._example) if self._example is not None else []
        return [*network, *kept, *mutable, *self.gradients.buffers, *self.more_state()]

    _example: Tensor | None = None

    def _signature(self, x: Tensor) -> object:
        """Return everything that a captured graph depends on: settings, modes, shapes, and addresses of tensors."""
        train, model = self.train, self.model
        train.robust_fraction.to(x.device)
        train.history.to(x.device)
        self._example = x if self._example is None or len(x) > len(self._example) else self._example
        parts = [train.objective, train.budget, train.score, train.separation, train.robust_fraction]
        # As a step sees them, which puts all modules into training mode unless the network as a whole is in it.
        modes = [module.training or not model.training for module in model.modules()]
        tensors = [*model.parameters(), *model.buffers(), *train.history.tensors()]
        tensors += [] if train.history.weight is None else [train.history.weight]
        tensors += train.objective.mutable_state(self._example)
        places = [(t.data_ptr(), t.requires_grad) for t in tensors]
        # Attacks have copies of these in the network's dtype and on its device.
        copied = [part for part in (train.objective.eps, *train.objective.bounds) if isinstance(part, Tensor)]
        weight = next(model.parameters(), x)
        versions = [t._version for t in copied if (t.dtype, t.device) != (weight.dtype, weight.device)]
        return [_mark(part) for part in parts], (x.shape[1:], x.dtype, x.device), modes, places, versions


class _Same:
    """Compares equal if it holds the same object."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


MAX_DEPTH = 3
"""Depth of the attributes of parts that are compared."""


def _mark(value: object, depth: int = 0) -> object:
    """Return a value to compare a setting by: numbers and strings by value, other objects by identity and attributes.

    Values of tensors, states of generators and what networks hold may change without a new capture.
    """
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, tuple):
        return tuple(_mark(part, depth) for part in value)
    if isinstance(value, torch.Generator):
        return None
    if depth == MAX_DEPTH or isinstance(value, (Tensor, nn.Module, type)):
        return _Same(value)
    return _Same(value), *(_mark(part, depth + 1) for part in getattr(value, "__dict__", {}).values())


class Gradients:
    """Gradients in fixed memory, so that the optimiser finds them wherever a graph computed them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rebuild(keep_buffers=False)

    def rebuild(self, *, keep_buffers: bool) -> None:
        """Start anew for the present weights; ``keep_buffers``: in fixed memory, else where autograd puts them."""
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.buffers = [torch.zeros_like(parameter) for parameter in self.parameters] if keep_buffers else []
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                parameter.grad = None
        self.has_grad = self.had_grad = [False] * len(self.parameters)

    def prepare(self, *, accumulate: bool) -> None:
        """Before a step that accumulates, continue from the present ``grad`` of the weights, which may be None."""
        self.had_grad = [accumulate and parameter.grad is not None for parameter in self.parameters]
        if accumulate:
            for mine, parameter in zip(self.buffers, self.parameters, strict=bool(self.buffers)):
                if parameter.grad is None:
                    mine.zero_()
                elif parameter.grad is not mine:
                    mine.copy_(parameter.grad)

    def backward(self, loss: Tensor, forwards: Forwards, accumulate: bool, scale: float) -> None:
        """Compute the gradients of a loss, as part of its phase."""
        if self.buffers or not accumulate:
            for parameter in self.parameters:
                parameter.grad = None
        (loss if scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]
        forwards.collect_gradients()
        if not self.buffers:
            return
        self.has_grad = [parameter.grad is not None for parameter in self.parameters]
        pairs = [(mine, p.grad) for mine, p in zip(self.buffers, self.parameters, strict=True) if p.grad is not None]
        if pairs:
            with torch.no_grad():
                combine = torch._foreach_add_ if accumulate else torch._foreach_copy_
                combine([mine for mine, _ in pairs], [gradient for _, gradient in pairs])

    def assign(self) -> None:
        """Set the ``grad`` of the weights; None where the loss does not depend on the weight."""
        if self.buffers:
            rows = zip(self.buffers, self.parameters, self.has_grad, self.had_grad, strict=True)
            for buffer, parameter, has_grad, had_grad in rows:
                parameter.grad = buffer if has_grad or had_grad else None

    def existing(self) -> list[Tensor]:
        """Return the gradients that exist."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda
