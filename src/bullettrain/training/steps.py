"""Training steps of a run: :class:`Captured` with the optimiser and the moving average, and the training clock."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from bullettrain.config.sections import Config, TrainingConfig
from bullettrain.engine.captured import Captured
from bullettrain.engine.cuda_graphs import CudaGraphRunner, materialize, optimizer_tensors
from bullettrain.engine.phases import Batch
from bullettrain.processes import Place
from bullettrain.step import BulletTrain, StepOutput
from bullettrain.training.metrics import StepMetrics
from bullettrain.training.optimizer import MovingAverage, make_optimizer, set_rate
from bullettrain.training.state import Position


class Stepper:
    """Trains on a unit of mini-batches at a time and updates the weights and their moving average.

    Args:
        engine: the method.
        network: the network to train.
        average: its moving average, if any.
        metrics: accumulates the metrics of each step.
        config: of the run.
        place: device and processes.
        on_message: called with a one-line message when a feature is not available.
        on_output: called with the output of each step.
    """

    def __init__(
        self,
        engine: BulletTrain,
        network: nn.Module,
        average: MovingAverage | None,
        metrics: StepMetrics,
        config: Config,
        place: Place,
        *,
        on_message: Callable[[str], None],
        on_output: Callable[[StepOutput], None] = lambda out: None,
    ) -> None:
        training = config.training
        self.engine, self.network, self.average = engine, network, average
        self.metrics, self.config, self.place, self.on_output = metrics, config, place, on_output
        wanted = training.engine == "graphs" or (training.engine == "auto" and place.device.type == "cuda")
        self.captured = wanted and place.device.type == "cuda"
        if wanted and not self.captured:
            on_message("CUDA graphs are off, steps run one by one: there is no CUDA device")
        method = config.method
        if place.together and (method.allocation == "gaussian" or engine.objective.whole_batch):
            what = "allocation=gaussian" if method.allocation == "gaussian" else method.objective
            on_message(f"{what} is computed in each process by itself, which differs from training in one process")
        ungrouped = None
        if training.accumulate > 1:
            ungrouped = "gradients are accumulated"
        elif engine.objective.one_by_one:
            ungrouped = "its attack and its update share state"
        if training.attack_group > 1 and ungrouped:
            on_message(f"mini-batches are attacked one by one: {ungrouped}")
        self.unit = training.accumulate if ungrouped else training.attack_group
        """Mini-batches per call of :meth:`take`; a run stops and saves only between units."""
        self.fast = Captured(
            engine,
            network,
            dtype=autocast_dtype(training, place.device),
            compile=training.compile,
            attack_group=1 if ungrouped else training.attack_group,
            size_multiple=training.size_multiple,
            pair=training.paired_forward,
            cudnn_benchmark_after=training.cudnn_benchmark_after,
            capture=self.captured,
            on_message=on_message,
            record=metrics.add,
        )
        self.fast.more_state = self._state
        self.optimizer = make_optimizer(network, config.optimizer, capturable=self.captured)
        if self.captured:
            materialize(self.optimizer)
        self._warm_up_seconds = 0.0

    @property
    def capture_seconds(self) -> float:
        """Seconds spent on compilation and captures so far."""
        return self._warm_up_seconds + self.fast.seconds

    def warm_up(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Do one-time work on the first of ``batches``, without a change to the run's state.

        With CUDA graphs only a mini-batch is made, which may compile augmentations; captures are timed as they occur.
        Otherwise a copy of the network takes a step, and with compilation also one on a smaller mini-batch. On a CPU
        without compilation a step on two images has all of that work.
        """
        if self.captured:
            began = time.perf_counter()
            next(iter(batches))
            torch.cuda.synchronize()
            self._warm_up_seconds = time.perf_counter() - began
            return
        devices = [self.place.device] if self.place.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            network, engine = copy.deepcopy(self.network), self.config.method.build(self.engine.history.examples)
            if self.config.method.leave_out:
                engine.history.weigh(torch.ones(engine.history.examples))
            engine.check_every, compiled = self.engine.check_every, self.config.training.compile
            if compiled:
                torch.compiler.reset()  # a second run in this process compiles as well, and outside its training time
            fast = Captured(engine, network, dtype=self.fast.dtype, compile=compiled, capture=False)
            optimizer = make_optimizer(network, self.config.optimizer)
            x, y = next(iter(batches))
            sizes = (len(x), max(2, len(x) // 2)) if compiled else (len(x) if devices else 2,)
            for part in (x[:size] for size in sizes):
                index = None
                if engine.history.examples:  # other examples in each process
                    first = self.place.rank * len(x)
                    index = torch.arange(first, first + len(part), device=y.device) % engine.history.examples
                fast.step(part, y[: len(part)], index=index)
            optimizer.step()

    def loaded(self) -> None:
        """Drop captured graphs after a checkpoint was loaded: tensors may have moved."""
        if isinstance(self.fast.runner, CudaGraphRunner):
            self.fast.runner.forget()

    def take(self, batches: Sequence[Batch], rate: Callable[[int], float]) -> StepOutput:
        """Train on up to ``unit`` mini-batches and return the last one's output.

        Args:
            batches: the mini-batches.
            rate: learning rate of the i-th one.
        """
        accumulates = self.config.training.accumulate > 1
        for i, out in enumerate(self._accumulated(batches) if accumulates else self.fast.updates(batches)):
            self.metrics.passes += out.work.total
            self.on_output(out)
            if not accumulates or i + 1 == len(batches):
                set_rate(self.optimizer, rate(i))
                self.fast.runner(self.move_weights)
        return out

    def _accumulated(self, batches: Sequence[Batch]) -> Iterator[StepOutput]:
        """Yield the output of each mini-batch, while gradients add up to their mean."""
        for i, batch in enumerate(batches):
            yield from self.fast.updates([batch], (i > 0, 1 / len(batches)))

    def move_weights(self) -> None:
        """Clip gradients, update the weights and the moving average. Runs as a phase."""
        if self.config.optimizer.clip:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optimizer.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.move(self.network)

    def _state(self) -> list[Tensor]:
        average = [] if self.average is None else [*self.average.parameters(), *self.average.buffers()]
        return [*optimizer_tensors(self.optimizer), self.metrics.sums, *average]


class Clock:
    """Measures training time, without compilation and captures. It is stopped while a run evaluates and saves."""

    def __init__(self, device: torch.device, stepper: Stepper) -> None:
        self.device, self.stepper = device, stepper
        self._started: float | None = None
        self._captured_at_start, self._counted = 0.0, 0.0

    def start(self) -> None:
        """Start."""
        self._started, self._captured_at_start = time.perf_counter(), self.stepper.capture_seconds

    def running(self) -> float:
        """Return the seconds since the start, captures included, without waiting for the device."""
        return 0.0 if self._started is None else time.perf_counter() - self._started

    def stop(self, position: Position) -> None:
        """Wait for the device and add the seconds of training, and of captures since the last stop, to ``position``."""
        if self._started is None:
            return
        synchronize(self.device)
        captured = self.stepper.capture_seconds
        seconds = self.running() - (captured - self._captured_at_start)
        position.seconds += seconds
        position.epoch_seconds += seconds
        position.capture_seconds += captured - self._counted
        self._started, self._counted = None, captured


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def autocast_dtype(training: TrainingConfig, device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype of training steps; None for float32."""
    if training.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None
    return torch.bfloat16 if training.precision == "bf16" else None
