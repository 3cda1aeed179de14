"""How a run takes its training steps: `Captured`, with the run's optimiser and average as a phase, and its clock."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence

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


class Stepper:
    """Takes the steps of a unit of mini-batches, weights and average included.

    Args:
        engine: objective, budget, F_R.
        network: what is trained.
        average: its moving average, if any.
        metrics: what steps are counted in.
        config, place: of the run.
        say: told in one line what cannot be had.
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
        say: Callable[[str], None],
    ) -> None:
        training = config.training
        self.engine, self.network, self.average = engine, network, average
        self.metrics, self.config, self.place = metrics, config, place
        wanted = training.engine == "graphs" or (training.engine == "auto" and place.device.type == "cuda")
        self.captured = wanted and place.device.type == "cuda"
        if wanted and not self.captured:
            say("CUDA graphs are off, steps run one by one: there is no CUDA device")
        alone = "gradients are accumulated" if training.accumulate > 1 else None
        alone = alone or ("its corruption and its update are one piece" if engine.objective.whole_step else None)
        method = config.method
        if place.together and (method.allocation == "gaussian" or method.objective == "nuat"):
            what = "allocation=gaussian" if method.allocation == "gaussian" else "nuat"
            say(f"{what} looks at each process's part of a mini-batch by itself: another method than in one process")
        if training.attack_group > 1 and alone:
            say(f"mini-batches are attacked one by one: {alone}")
        self.unit = training.accumulate if alone else training.attack_group
        """Mini-batches that belong together; a run stops and saves between units."""
        self.fast = Captured(
            engine,
            network,
            dtype=autocast_dtype(training, place.device),
            compile=training.compile,
            attack_group=training.attack_group,
            size_multiple=training.size_multiple,
            pair=training.paired_forward,
            cudnn_benchmark_after=training.cudnn_benchmark_after,
            capture=self.captured,
            say=say,
            record=metrics.add,
        )
        self.fast.more_state = self._state
        self.keep: Callable[[StepOutput], None] = lambda out: None
        """Shown what each step gave."""
        self.optimizer = make_optimizer(network, config.optimizer, capturable=self.captured)
        if self.captured:
            materialize(self.optimizer)
        self._warm_up_seconds = 0.0

    @property
    def capture_seconds(self) -> float:
        """Time spent so far on compilation and captures."""
        return self._warm_up_seconds + self.fast.seconds

    def warm_up(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Load what the first step would, on the first of ``batches``, and change nothing.

        On a GPU a mini-batch is made, for which views of images may be compiled; all else is counted as it comes.
        Plainly a step is taken on a copy; compiled, also on part of a mini-batch.
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
            engine.check_every, compiled = self.engine.check_every, self.config.training.compile
            if compiled:
                torch.compiler.reset()  # so that of two runs in a row both pay, and neither on the clock
            fast = Captured(engine, network, dtype=self.fast.dtype, compile=compiled, capture=False)
            optimizer = make_optimizer(network, self.config.optimizer)
            x, y = next(iter(batches))
            for part in (x, x[: max(2, len(x) // 2)]) if compiled else (x,):
                index = torch.arange(len(part), device=y.device) if engine.history.examples else None
                fast.step(part, y[: len(part)], index=index)
            optimizer.step()

    def loaded(self) -> None:
        """The optimiser's and the average's state were loaded: they may lie elsewhere now."""
        if isinstance(self.fast.runner, CudaGraphRunner):
            self.fast.runner.forget()

    def take(self, batches: Sequence[Batch], rate: Callable[[int], float]) -> StepOutput:
        """Train on up to ``unit`` mini-batches, the i-th at ``rate(i)``; returns the last one's output."""
        if self.config.training.accumulate == 1:
            for i, out in enumerate(self.fast.updates(batches)):
                self._count(out)
                self._update(rate(i))
            return out
        for i, batch in enumerate(batches):  # one update of the weights from all of them
            (out,) = self.fast.updates([batch], (i > 0, 1 / len(batches)))
            self._count(out)
        self._update(rate(len(batches) - 1))
        return out

    def _count(self, out: StepOutput) -> None:
        self.metrics.passes += out.work.total
        self.keep(out)

    def _update(self, rate: float) -> None:
        set_rate(self.optimizer, rate)
        self.fast.runner(self.move_weights)

    def move_weights(self) -> None:
        """Clip, update, average: a phase."""
        if self.config.optimizer.clip:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optimizer.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.move(self.network)

    def _state(self) -> list[Tensor]:
        average = [] if self.average is None else [*self.average.parameters(), *self.average.buffers()]
        return [*optimizer_tensors(self.optimizer), self.metrics.sums, *average]


class Clock:
    """Seconds of training, without compilation and captures; it stands while a run evaluates and saves."""

    def __init__(self, device: torch.device, stepper: Stepper) -> None:
        self.device, self.stepper = device, stepper
        self._began: float | None = None
        self._captured_before, self._counted = 0.0, 0.0

    def start(self) -> None:
        """Count from now."""
        self._began, self._captured_before = time.perf_counter(), self.stepper.capture_seconds

    def running(self) -> float:
        """Seconds since it was started, captures among them; the device may still be at work."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def stop(self) -> tuple[float, float]:
        """Wait for the device; seconds since the start and, since the last stop, those of compiling and capturing."""
        if self._began is None:
            return 0.0, 0.0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        captured = self.stepper.capture_seconds
        spent = self.running() - (captured - self._captured_before)
        more = captured - self._counted  # also what was spent while the clock stood
        self._began, self._counted = None, captured
        return spent, more


def autocast_dtype(training: TrainingConfig, device: torch.device) -> torch.dtype | None:
    """What steps compute in; None: float32."""
    if training.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None
    return torch.bfloat16 if training.precision == "bf16" else None
