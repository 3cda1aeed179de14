"""Two ways to take training steps: the plain engine, one mini-batch at a time, and engines on static buffers."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from bullettrain.engine import BulletTrain, StepOutput
from bullettrain.engine.captured import static_engine
from bullettrain.engine.graphed import Graphs, materialize, optimizer_tensors
from bullettrain.engine.group import GroupEngine, GroupSettings
from bullettrain.engine.learner import in_any_size
from bullettrain.engine.parts import why_not_grouped
from bullettrain.engine.runner import Batch, at_once
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
            network, engine = copy.deepcopy(self.network), self.config.method.engine(examples=self.engine.last.examples)
            engine.check_every = self.engine.check_every
            if self.config.training.compile:
                torch.compiler.reset()  # so that of two runs in a row both pay, and neither on the clock
            model = self._compiled(network)
            optimizer = make_optimizer(network, self.config.optimizer)
            x, y = next(iter(batches))
            for part in (x, x[: max(2, len(x) // 2)]) if self.config.training.compile else (x,):
                with self._precision():
                    out = engine.step(model, part, y[: len(part)], index=torch.arange(len(part), device=y.device))
                out.loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def loaded(self) -> None:
        """Nothing here depends on where that state lies."""

    def take(self, batches: list[Batch], rate: Callable[[int], float], joint: list[int]) -> StepOutput:
        """One update of the weights from all of ``batches``."""
        for index, (x, y, start, which) in enumerate(batches):
            last = index + 1 == len(batches)
            waits = isinstance(self.model, nn.parallel.DistributedDataParallel) and not last
            with self.model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                with self._precision():
                    out = self.engine.step(self.model, x, y, start=start, index=which)
                (out.loss / len(batches)).backward()  # type: ignore[no-untyped-call]
            self.tally.add(out, y, joint[index] / self.place.world)
            self.tally.passes += out.work.total
        set_rate(self.optimizer, rate(len(batches) - 1))
        if self.config.optimizer.clip:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.move(self.network)
        return out

    def _compiled(self, network: nn.Module) -> nn.Module:
        return in_any_size(network) if self.config.training.compile else network

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.place.device.type, torch.bfloat16, enabled=self.half)


class StaticStepper:
    """An engine on static buffers: at once on any device, captured on a GPU."""

    def __init__(
        self,
        engine: BulletTrain,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: MovingAverage | None,
        tally: Tally,
        config: Config,
        *,
        whole: bool,
        half: bool,
        captured: bool,
        say: Callable[[str], None],
    ) -> None:
        training = config.training
        self.unit, self.warm_up_seconds = 1 if whole else training.attack_group, 0.0
        self.network, self.optimizer, self.average, self.tally, self.config = network, optimizer, average, tally, config
        # In single precision what is chosen first stays.
        self.graphs = Graphs(self._state, say, tune_after=training.tune_after if half else 0.0) if captured else None
        settings = GroupSettings(
            group=training.attack_group,
            bucket=training.bucket,
            fresh=training.fresh,
            half=half,
            compile=training.compile,
            captured=captured,
            joint=training.joint,
        )
        runner = self.graphs or at_once
        self.engine = static_engine(
            engine, network, self._move, settings, whole=whole, runner=runner, observe=self._observe, say=say
        )
        if captured:
            materialize(optimizer)

    @property
    def capture_seconds(self) -> float:
        """Time spent so far on compilation and captures."""
        compiled = self.engine.seconds if isinstance(self.engine, GroupEngine) else 0.0
        return self.warm_up_seconds + compiled + (0.0 if self.graphs is None else self.graphs.seconds)

    def warm_up(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Make a mini-batch: on a GPU what makes views of images is compiled. All else is counted as it comes."""
        if next(self.network.parameters()).is_cuda:
            began = time.perf_counter()
            next(iter(batches))
            torch.cuda.synchronize()
            self.warm_up_seconds = time.perf_counter() - began

    def loaded(self) -> None:
        """The optimiser's and the average's state were loaded: they may lie elsewhere now."""
        if self.graphs is not None:
            self.graphs.reset()

    def take(self, batches: list[Batch], rate: Callable[[int], float], joint: list[int]) -> StepOutput:
        """One attack on all of ``batches``, then one update from each."""
        set_rate(self.optimizer, rate(0))
        for index, out in enumerate(self.engine.updates(batches), start=1):
            average = self.average
            if average is not None:
                self.engine.run("average", lambda average=average: average.move(self.network))  # type: ignore[misc]
            self.tally.passes += out.work.total
            if index < len(batches):
                set_rate(self.optimizer, rate(index))
        return out

    def _move(self) -> None:
        if self.config.optimizer.clip:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optimizer.clip)
        self.optimizer.step()

    def _observe(self, out: StepOutput, y: Tensor) -> None:
        self.tally.add(out, y, len(y))

    def _state(self) -> list[Tensor]:
        average = [] if self.average is None else [*self.average.parameters(), *self.average.buffers()]
        return [*self.engine.tensors(), *optimizer_tensors(self.optimizer), self.tally.sums, *average]


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
    apart = plain or why_not_grouped(engine)
    whole = engine.budget.uniform_steps is not None  # the host need not know what the device finds
    obstacle = plain or (None if place.device.type == "cuda" else "there is no CUDA device")
    obstacle = obstacle or (None if whole else apart)
    captured = wanted and obstacle is None
    if wanted and not captured:
        say(f"CUDA graphs are off, steps run one by one: {obstacle}")
    if training.attack_group > 1 and apart:
        say(f"mini-batches are attacked one by one: {apart}")
    half = in_half(training, place.device)
    optimizer = make_optimizer(network, config.optimizer, capturable=captured)
    parts = engine, network, optimizer, average, tally, config
    if captured or (apart is None and training.attack_group > 1):
        try:
            static = StaticStepper(*parts, whole=apart is not None, half=half, captured=captured, say=say)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return static, optimizer
    return PlainStepper(*parts, place, half=half), optimizer


def _why_plain(config: Config, place: Place) -> str | None:
    """Why only the plain engine can take a run's steps, if so."""
    if config.training.accumulate > 1:
        return "gradients are accumulated"
    if place.together:
        return "several processes share the step"
    if config.method.clean or config.method.ramp:
        return "the attack changes with time (method.clean, method.ramp)"
    return None


def in_half(training: TrainingConfig, device: torch.device) -> bool:
    """Whether steps run in bfloat16."""
    if training.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return training.precision == "bf16"
