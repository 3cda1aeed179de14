"""The fast engine in a training loop of one's own: gradients of whole steps, as CUDA graphs where they can be had."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from bullettrain.attacks.state import bare
from bullettrain.augmix import ViewMaker
from bullettrain.checks import (
    check_batch,
    check_count,
    check_index,
    check_labels,
    check_logits,
    check_module,
)
from bullettrain.engine.graphed import TUNE_AFTER, Graphs
from bullettrain.engine.group import GroupEngine, GroupSettings
from bullettrain.engine.learner import in_any_size
from bullettrain.engine.parts import why_not_grouped, why_not_replayed, why_not_whole
from bullettrain.engine.runner import Batch, Runner, at_once
from bullettrain.engine.step import BulletTrain, StepOutput
from bullettrain.engine.whole import WholeEngine
from bullettrain.objectives import AugMix

PATIENCE = 3
"""How often all is captured anew after a few steps before that is left."""
FEW = 50

_Given = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""x, y, and start and index where there are any."""


class Captured:
    """A `BulletTrain` whose steps are captured as CUDA graphs: on a GPU the plain step waits for kernel launches.

        train = BulletTrain(TRADES(beta=6.0, eps=8/255), budget=StepBudget(boundary=10, robust=2), gamma=0.8)
        fast = Captured(train, model, half=True, compile=True)
        for x, y in loader:
            out = fast.step(x, y)  # gradients are there, as after out.loss.backward()
            optimizer.step()

    Optimiser, scheduler, clipping and weight averages stay the loop's. Each step writes all gradients anew, to the same
    memory: there is nothing to zero, and nothing can be accumulated. The first steps compile and capture, some seconds
    to minutes; then sizes repeat, and in half precision one that has run for a minute is tuned, for some seconds. What
    Python does in the network, or in hooks of it, is done once or twice a size and not again. ``train`` keeps F_R and
    its ``state_dict()``, and looks at values every ``check_every`` steps, as ever. Without a GPU, and for what cannot
    be captured, steps are the plain ones, and a warning says why.

    Args:
        train: what is to be trained by.
        model: the network itself, on its device: not wrapped, not compiled.
        half: run it in bfloat16, as autocast does; weights and gradients stay as they are.
        compile: compile it, once for all batch sizes.
        group: mini-batches that :meth:`steps` attacks at once; 1 is the paper.
        fresh: of a group, the last attack steps that are taken with the mini-batch's own weights.
        bucket: sizes are rounded up to a multiple of this, towards more care; 1 is exact, and captures every size.
        say: told in one line what cannot be had; None: it is a warning.
    """

    def __init__(
        self,
        train: BulletTrain,
        model: nn.Module,
        *,
        half: bool = False,
        compile: bool = False,
        group: int = 1,
        fresh: int = 0,
        bucket: int = 8,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if not isinstance(train, BulletTrain):
            raise TypeError(f"train is {type(train).__name__}; give a BulletTrain")
        check_module(model)
        if bare(model) is not model or isinstance(model, nn.DataParallel):
            raise ValueError("the model is wrapped for several devices; for these, use train.step(model, x, y)")
        if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
            raise ValueError("the model is compiled already; give the network itself, and compile=True")
        check_count(fresh, "fresh")
        for name, value in (("group", group), ("bucket", bucket)):
            if check_count(value, name) == 0:
                raise ValueError(f"{name} is 0; give 1 or more")
        self.train, self.model, self.half, self.compile = train, model, half, compile
        self.settings = GroupSettings(group=group, fresh=fresh, bucket=bucket, half=half, compile=compile, joint=True)
        self.say = say or (lambda text: warnings.warn(text, stacklevel=7))  # the line that takes a step
        self.reason: str | None = None
        """Why steps are not captured, if so; known after the first one."""
        self._engine: GroupEngine | WholeEngine | None = None
        self._gradients = _Gradients(model)
        self._made_for: object = None
        self._hasty, self._taken, self._turn = 0, FEW, 0
        self._plain: nn.Module = in_any_size(model) if compile else model

    def step(self, x: Tensor, y: Tensor, *, start: Tensor | None = None, index: Tensor | None = None) -> StepOutput:
        """Loss and gradients of one mini-batch; F_R moves on. Arguments as of `BulletTrain.step`."""
        (out,) = self._steps([(x, y, start, index)])
        return out

    def steps(self, batches: Iterable[tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]]) -> Iterator[StepOutput]:
        """The same of up to ``group`` mini-batches, attacked at once with the same weights.

            for out in fast.steps(batches):
                optimizer.step()  # from this mini-batch's gradients

        A loop that does not update in between would train on the last one alone. Where the last logits select, each
        is x, y and index.
        """
        group = self.settings.group
        some = list(itertools.islice(batches, group + 1))  # a whole loader would be read for nothing
        if len(some) > group:
            raise ValueError(
                f"more mini-batches were given at once than group={group}; give so many at a time, e.g."
                f" list(itertools.islice(batches, {group})) of batches = iter(loader)"
            )
        wanted = 3 if self.train.remembers else 2
        if other := [len(given) for given in some if len(given) != wanted]:
            what = "x, y and index" if self.train.remembers else "x and y"
            raise ValueError(f"a mini-batch is {what} here; one with {other[0]} parts was given")
        return self._steps([(given[0], given[1], None, given[2] if len(given) > 2 else None) for given in some])

    # --------------------------------------------------------------------------------------------- the way

    def _steps(self, batches: Sequence[_Given]) -> Iterator[StepOutput]:
        looks = self._is_due(len(batches))
        for x, y, start, index in batches:
            self._check(x, y, start)
            if self.train.remembers:
                check_index(index, y, self.train.last.examples, look=looks)
        engine = self._find(batches[0][0]) if batches else None
        if engine is None:
            for given in batches:
                yield self._one_plain(*given)
            return
        self._turn += 1
        mine, objective = self._turn, self.train.objective
        if looks:
            for x, *_ in batches:
                objective.check_inputs(x)
        begun = [Batch(x, y, self._opening(x) if start is None else start, index) for x, y, start, index in batches]
        for (x, y, *_), out in zip(begun, engine.updates(begun), strict=True):
            if looks:
                objective.check_perturbed(x, out.x_prime)
                check_logits(out.z_prime, self.train.steps_taken)
                check_labels(y, out.z_prime.shape[-1])
            self._gradients.show()
            yield out.clone() if isinstance(engine, GroupEngine) else out
            if mine != self._turn:
                raise RuntimeError("another step was taken before these were; finish a group before the next")

    def _check(self, x: Tensor, y: Tensor, start: Tensor | None) -> None:
        """What `BulletTrain.step` refuses, before anything is drawn or captured."""
        check_batch(x, y)
        if torch.is_autocast_enabled(x.device.type):
            raise ValueError("autocast is on around a captured step; leave it off, and give half=True instead")
        if not torch.is_grad_enabled():
            raise ValueError("gradients are off around a step (no_grad or inference_mode); a step is to make them")
        objective = self.train.objective
        if start is None:
            return
        shape = tuple(x.shape)
        if isinstance(objective, AugMix) and isinstance(objective.views, ViewMaker):
            shape = (len(x), objective.copies, objective.views.numbers)
        if tuple(start.shape) != shape and self._engine is not None:
            raise ValueError(
                f"start has the shape {tuple(start.shape)}; captured steps want {shape}, as opening(x) gives"
            )

    def _opening(self, x: Tensor) -> Tensor:
        start = self.train.objective.opening(x)
        assert start is not None  # what starts from nothing is not captured
        return start

    def _is_due(self, count: int) -> bool:
        """Whether one of the next ``count`` steps is one at which values are looked at, which waits for the device."""
        every = self.train.check_every
        return bool(every) and -self.train.steps_taken % every < count

    def _one_plain(self, x: Tensor, y: Tensor, start: Tensor | None, index: Tensor | None) -> StepOutput:
        for parameter in self.model.parameters():
            parameter.grad = None
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half):
            out = self.train.step(self._plain, x, y, start=start, index=index)
        out.loss.backward()  # type: ignore[no-untyped-call]
        return dataclasses.replace(out, loss=out.loss.detach())

    def _find(self, x: Tensor) -> GroupEngine | WholeEngine | None:
        """The engine for the network, the settings and the images' shape as they are now; None: the plain step."""
        now = self._signature(x)
        if now != self._made_for:
            self._hasty = self._hasty + 1 if self._taken < FEW else 0
            self._engine = None
            gc.collect()  # graphs hold memory, in circles
            self._engine = self._make(x)
            self._made_for, self._taken = now, 0
        self._taken += 1
        return self._engine

    def _make(self, x: Tensor) -> GroupEngine | WholeEngine | None:
        apart, reason = why_not_grouped(self.train), self._why_not_captured(x)
        captured, grouped = reason is None, apart is None and self.settings.group > 1
        self._leave(reason, at_once=grouped)
        if captured and apart and self.settings.group > 1:
            self.say(f"mini-batches are attacked one by one: {apart}")
        if not captured and not grouped:
            return None
        self._gradients = _Gradients(self.model)
        tune_after = TUNE_AFTER if self.half else 0.0
        return static_engine(
            self.train,
            self.model,
            self._gradients.hold,
            dataclasses.replace(self.settings, captured=captured),
            whole=apart is not None,
            runner=Graphs(self._state, self._given_up, tune_after=tune_after) if captured else at_once,
            say=self.say,
        )

    def _why_not_captured(self, x: Tensor) -> str | None:
        if self._hasty >= PATIENCE:
            return "settings, shapes, modes or weights' memory change again and again"
        if not _on_gpu(x):
            return "there is no CUDA device"
        if x.is_cuda and x.device.index != torch.cuda.current_device():
            return f"{x.device} is not the current device; call torch.cuda.set_device first"
        return why_not_replayed(self.train) or (why_not_whole(self.train) if why_not_grouped(self.train) else None)

    def _given_up(self, line: str) -> None:
        """A capture failed; the engine goes on without."""
        self.reason = line.partition(": ")[2]
        self.say(line)

    def _leave(self, reason: str | None, *, at_once: bool) -> None:
        """Say why steps are not captured, where that is new."""
        if reason is not None and reason != self.reason:
            self.say(f"CUDA graphs are off{'' if at_once else ', steps run one by one'}: {reason}")
        self.reason = reason

    def _state(self) -> list[Tensor]:
        assert self._engine is not None
        return [*self._engine.tensors(), *self._gradients.held]

    def _signature(self, x: Tensor) -> object:
        """Everything that a captured graph takes as it was: settings, modes, shapes, and where the network lies."""
        train, model = self.train, self.model
        train.robust_fraction.to(x.device)
        train.last.to(x.device)
        settings = [train.budget, *vars(train.objective).values(), *vars(train.robust_fraction).values()]
        settings += [train.score, train.separation, train.objective, train.robust_fraction]
        modes = [module.training or not model.training for module in model.modules()]
        tensors = [*model.parameters(), *model.buffers(), train.last.live]
        places = [(t.data_ptr(), t.requires_grad) for t in tensors]
        return [_mark(value) for value in settings], (x.shape[1:], x.dtype, x.device), modes, places


def static_engine(
    train: BulletTrain,
    network: nn.Module,
    update: Callable[[], None],
    settings: GroupSettings,
    *,
    whole: bool,
    runner: Runner,
    observe: Callable[[StepOutput, Tensor], None] | None = None,
    say: Callable[[str], None] = print,
) -> GroupEngine | WholeEngine:
    """The engine on static buffers for these steps: in groups, or each as a whole.

    Sizes are rounded, and batches joined, where that pays: captured, and for the latter compiled.
    """
    captured, compile, half = settings.captured, settings.compile, settings.half
    if whole:
        model = in_any_size(network) if compile else network
        return WholeEngine(train, model, update, observe=observe, half=half, runner=runner)
    joint = settings.joint and captured and compile
    settings = dataclasses.replace(settings, bucket=settings.bucket if captured else 1, joint=joint)
    return GroupEngine(train, network, update, observe=observe, settings=settings, runner=runner, say=say)


class _Same:
    """Equal to what holds the same object."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def _mark(value: object) -> object:
    """What tells a setting from another: numbers and words by value, anything else by which object it is.

    A tensor that an objective carries, or a generator, is no setting; engines look after the first themselves.
    """
    if value is None or isinstance(value, (int, float, str, tuple)):
        return value
    return None if isinstance(value, (Tensor, torch.Generator)) else _Same(value)


class _Gradients:
    """Gradients in memory of their own: whichever graph computed them, that is where the optimiser finds them."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.held = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.known: list[bool] = [False] * len(self.held)

    def hold(self) -> None:
        """After a backward, as part of its piece."""
        self.known = [parameter.grad is not None for parameter in self.parameters]
        pairs = [(mine, p.grad) for mine, p in zip(self.held, self.parameters, strict=True) if p.grad is not None]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([mine for mine, _ in pairs], [gradient for _, gradient in pairs])

    def show(self) -> None:
        """Give them to the weights; those that the loss does not depend on have none."""
        for mine, parameter, known in zip(self.held, self.parameters, self.known, strict=True):
            parameter.grad = mine if known else None


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda
