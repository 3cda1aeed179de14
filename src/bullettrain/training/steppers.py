"""How training steps are taken: one mini-batch at a time, the same in a CUDA graph, and groups on static buffers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from bullettrain.engine import BulletTrain, StepOutput
from bullettrain.engine.graphed import Graphs, materialize, optimizer_tensors
from bullettrain.engine.group import Batch, GroupEngine, GroupSettings, at_once
from bullettrain.engine.memory import like
from bullettrain.engine.parts import why_not
from bullettrain.training.average import MovingAverage
from bullettrain.training.config import Config, TrainingConfig
from bullettrain.training.optim import make_optimizer, set_rate
from bullettrain.training.settings import ConfigError
from bullettrain.training.setup import Place
from bullettrain.training.tally import Tally


class Stepper(Protocol):
    """Takes the steps of a unit of mini-batches, weights and average included."""

    unit: int
    """Mini-batches that belong together; a run stops and saves between units."""

    @property
    def capture_seconds(self) -> float:
        """Time spent so far on compilation and captures."""
        ...

    def warm_up(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Load what the first step would, on the first of ``batches``, and change nothing."""
        ...

    def loaded(self) -> None:
        """The optimiser's and the average's state were loaded."""
        ...

    def take(self, batches: list[Batch], rate: Callable[[int], float], joint: list[int]) -> StepOutput:
        """Train on up to ``unit`` mini-batches, the i-th at ``rate(i)``; returns the last one's output.

        ``joint`` are their sizes over all processes.
        """
        ...


class PlainStepper:
    """`BulletTrain.step`, with gradient accumulation and several processes."""

    capture_seconds = 0.0

    def __init__(
        self,
        engine: BulletTrain,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: MovingAverage | None,
        tally: Tally,
        config: Config,
        place: Place,
        *,
        half: bool,
    ) -> None:
        self.engine, self.network, self.optimizer, self.average = engine, network, optimizer, average
        self.tally, self.config, self.place, self.half = tally, config, place, half
        self.unit = config.training.accumulate
        self.model = self._compiled(network)
        if place.together:
            self.model = nn.parallel.DistributedDataParallel(self.model)

    def warm_up(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """One step, on a copy; compiled, also on part of a mini-batch."""
        devices = [self.place.device] if self.place.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            network, engine = copy.deepcopy(self.network), self.config.method.engine()
            engine.check_every = self.engine.check_every
            if self.config.training.compile:
                torch.compiler.reset()  # so that of two runs in a row both pay, and neither on the clock
            model = self._compiled(network)
            optimizer = make_optimizer(network, self.config.optimizer)
            x, y = next(iter(batches))
            for part in (x, x[: max(2, len(x) // 2)]) if self.config.training.compile else (x,):
                with self._precision():
                    out = engine.step(model, part, y[: len(part)])
                out.loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def loaded(self) -> None:
        """Nothing here depends on where that state lies."""

    def take(self, batches: list[Batch], rate: Callable[[int], float], joint: list[int]) -> StepOutput:
        """One update of the weights from all of ``batches``."""
        for index, (x, y, start) in enumerate(batches):
            last = index + 1 == len(batches)
            waits = isinstance(self.model, nn.parallel.DistributedDataParallel) and not last
            with self.model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                out = self._backward(x, y, start, parts=len(batches))
            self.tally.add(out, y, joint[index] / self.place.world)
            self.tally.passes += out.work.total
        set_rate(self.optimizer, rate(len(batches) - 1))
        self._update()
        return out

    def _backward(self, x: Tensor, y: Tensor, start: Tensor, parts: int = 1) -> StepOutput:
        with self._precision():
            out = self.engine.step(self.model, x, y, start=start)
        (out.loss / parts).backward()  # type: ignore[no-untyped-call]
        return out

    def _update(self) -> None:
        if self.config.optimizer.clip:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.move(self.network)

    def _compiled(self, network: nn.Module) -> nn.Module:
        if not self.config.training.compile:
            return network
        compiled: nn.Module = torch.compile(network, dynamic=True)  # type: ignore[assignment]
        return compiled

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.place.device.type, torch.bfloat16, enabled=self.half)


class WholeStepper(PlainStepper):
    """The plain step as one CUDA graph a batch size: for what gives everyone the same steps, and cannot be grouped."""

    def __init__(
        self,
        engine: BulletTrain,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: MovingAverage | None,
        tally: Tally,
        config: Config,
        place: Place,
        *,
        half: bool,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(engine, network, optimizer, average, tally, config, place, half=half)
        self.graphs = Graphs(self._state, say)
        self._batch: Batch | None = None
        self._out: dict[int, StepOutput] = {}  # by batch size; its tensors are where the graph writes
        torch.backends.cudnn.benchmark = True  # sizes repeat: tuning each once pays
        materialize(optimizer)

    @property
    def capture_seconds(self) -> float:  # type: ignore[override]
        """Time spent so far on compilation and captures."""
        return self.graphs.seconds

    def loaded(self) -> None:
        """The optimiser's and the average's state were loaded: they may lie elsewhere now."""
        self.graphs.reset()

    def take(self, batches: list[Batch], rate: Callable[[int], float], joint: list[int]) -> StepOutput:
        """One update of the weights from the one batch."""
        (batch,) = batches
        m = len(batch[1])
        for mine, new in zip(self._buffers(batch), batch, strict=True):
            mine[:m] = new
        set_rate(self.optimizer, rate(0))
        self.graphs(("step", m), lambda: self._step(m))
        self.engine.steps_taken += 1
        out = self._out[m]
        self.tally.passes += out.work.total
        return out

    def _step(self, m: int) -> None:
        """Everything of a step, on the first ``m`` rows of the buffers."""
        assert self._batch is not None
        x, y, start = (part[:m] for part in self._batch)
        engine = self.engine
        taken, looks = engine.steps_taken, engine.check_every
        engine.check_every = 0  # a look waits for the device; the first one was at the warm-up
        try:
            out = self._backward(x, y, start)
        finally:
            engine.steps_taken, engine.check_every = taken, looks
        self.tally.add(out, y, m)
        self._update()
        self._out[m] = dataclasses.replace(out, loss=out.loss.detach())

    def _buffers(self, batch: Batch) -> Batch:
        """Where batches lie for the graphs. A batch that is larger than all before it gets new ones."""
        if self._batch is None or len(batch[1]) > len(self._batch[1]):
            x, y, start = (like(part, len(part)) for part in batch)
            self._batch = x, y, start
            self.engine.robust_fraction.to(x.device)
            self.graphs.reset()
        return self._batch

    def _state(self) -> list[Tensor]:
        assert self._batch is not None
        average = [] if self.average is None else [*self.average.parameters(), *self.average.buffers()]
        fraction = self.engine.robust_fraction.live
        return [
            *self.network.parameters(),
            *self.network.buffers(),
            *optimizer_tensors(self.optimizer),
            *average,
            *self.engine.objective.carried(self._batch[0]),
            fraction,
            self.tally.sums,
        ]


class GroupStepper:
    """The group engine: at once on any device, captured on a GPU."""

    def __init__(
        self,
        engine: BulletTrain,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: MovingAverage | None,
        tally: Tally,
        config: Config,
        *,
        half: bool,
        captured: bool,
        say: Callable[[str], None],
    ) -> None:
        training = config.training
        self.unit = training.attack_group
        self.network, self.optimizer, self.average, self.tally, self.config = network, optimizer, average, tally, config
        settings = GroupSettings(
            group=training.attack_group,
            bucket=training.bucket if captured else 1,
            fresh=training.fresh,
            half=half,
            compile=training.compile,
            captured=captured,
            joint=captured and training.compile and training.joint,
        )
        self.graphs = Graphs(self._state, say) if captured else None
        self.group = GroupEngine(
            engine,
            network,
            self._move,
            observe=self._observe,
            before=self._before,
            after=self._after,
            settings=settings,
            runner=self.graphs or at_once,
            say=say,
        )
        if captured:
            torch.backends.cudnn.benchmark = True  # sizes repeat: tuning each once pays
            materialize(optimizer)
        self._rate: Callable[[int], float] = lambda index: 0.0
        self._index = 0

    @property
    def capture_seconds(self) -> float:
        """Time spent so far on compilation and captures."""
        return self.group.learner.seconds + (0.0 if self.graphs is None else self.graphs.seconds)

    def warm_up(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Not needed: captures and compilations are counted one by one."""

    def loaded(self) -> None:
        """The optimiser's and the average's state were loaded: put them where a capture wants them."""
        if self.graphs is not None:
            self.graphs.reset()

    def take(self, batches: list[Batch], rate: Callable[[int], float], joint: list[int]) -> StepOutput:
        """One attack on all of ``batches``, then one update from each."""
        self._rate, self._index = rate, 0
        outputs = self.group.step(batches)
        self.tally.passes += sum(out.work.total for out in outputs)
        return outputs[-1]

    def _before(self) -> None:
        set_rate(self.optimizer, self._rate(self._index))
        self._index += 1

    def _move(self) -> None:
        if self.config.optimizer.clip:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optimizer.clip)
        self.optimizer.step()

    def _observe(self, out: StepOutput, y: Tensor) -> None:
        self.tally.add(out, y, len(y))

    def _after(self) -> None:
        average = self.average
        if average is not None:
            self.group.run("average", lambda: average.move(self.network))

    def _state(self) -> list[Tensor]:
        average = [] if self.average is None else [*self.average.parameters(), *self.average.buffers()]
        return [*self.group.tensors(), *optimizer_tensors(self.optimizer), self.tally.sums, *average]


def choose(
    engine: BulletTrain,
    network: nn.Module,
    average: MovingAverage | None,
    tally: Tally,
    config: Config,
    place: Place,
    *,
    say: Callable[[str], None],
) -> tuple[Stepper, torch.optim.Optimizer]:
    """The stepper that the configuration asks for or, with a line that says why, the one that can be had."""
    training = config.training
    wanted = training.engine == "graphs" or (training.engine == "auto" and place.device.type == "cuda")
    plain = _why_plain(config, place)
    apart = plain or why_not(engine)
    whole = engine.budget.uniform_steps is not None  # the host need not know what the device finds
    obstacle = plain or (None if place.device.type == "cuda" else "there is no CUDA device")
    obstacle = obstacle or (None if whole else apart)
    captured = wanted and obstacle is None
    if wanted and not captured:
        say(f"CUDA graphs are off, steps run one by one: {obstacle}")
    if training.attack_group > 1 and apart:
        say(f"mini-batches are attacked one by one: {apart}")
    half = _in_half(training, place.device)
    optimizer = make_optimizer(network, config.optimizer, capturable=captured)
    if apart is None and (captured or training.attack_group > 1):
        try:
            stepper = GroupStepper(
                engine, network, optimizer, average, tally, config, half=half, captured=captured, say=say
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return stepper, optimizer
    if captured:
        return WholeStepper(engine, network, optimizer, average, tally, config, place, half=half, say=say), optimizer
    return PlainStepper(engine, network, optimizer, average, tally, config, place, half=half), optimizer


def _why_plain(config: Config, place: Place) -> str | None:
    """Why only the plain engine can take a run's steps, if so."""
    if config.training.accumulate > 1:
        return "gradients are accumulated"
    if place.together:
        return "several processes share the step"
    if config.method.clean or config.method.ramp:
        return "the attack changes with time (method.clean, method.ramp)"
    return None


def _in_half(training: TrainingConfig, device: torch.device) -> bool:
    """Whether steps run in bfloat16."""
    if training.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return training.precision == "bf16"
