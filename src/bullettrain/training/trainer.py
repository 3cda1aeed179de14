"""The training loop: batches in, steps of the engine, checkpoints and records out."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bullettrain.config import Config, ConfigError
from bullettrain.data import ImageSet
from bullettrain.data.sets import fingerprint
from bullettrain.engine.phases import Batch
from bullettrain.formatting import method_name
from bullettrain.processes import Place, StoppedError, StopRequest
from bullettrain.run_folder import SHARES, CheckpointWriter, RunFolder, Weights
from bullettrain.step import StepOutput
from bullettrain.training import state
from bullettrain.training.collapse import CollapseError, WrongStreak, look_at_epoch, look_at_loss, low_probe
from bullettrain.training.display import Display
from bullettrain.training.evaluator import Evaluator
from bullettrain.training.metrics import StepMetrics, Sums, speedups
from bullettrain.training.optimizer import MovingAverage, average_statistics, rate
from bullettrain.training.recorder import Recorder
from bullettrain.training.setup import InitialPerturbation, make_loader, make_network, set_threads
from bullettrain.training.steps import Clock, Stepper
from bullettrain.validation import DivergedError


class Trainer:
    """One run: from a config and a folder to a trained network.

    Args:
        config, folder, place: of the run.
        data: training, validation and test images.
        console: where progress is shown; None: nowhere.
        keep_going: warn of a collapse, and go on.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        place: Place,
        data: tuple[ImageSet, ImageSet, ImageSet],
        *,
        console: Console | None = None,
        keep_going: bool = False,
    ) -> None:
        self.config, self.folder, self.place, self.keep_going = config, folder, place, keep_going
        self.train_set, self.validation_set, self.test_set = data
        if config.method.kind in ("free", "fgsm-pgi") and place.together:
            name = method_name(vars(config.method))
            raise ConfigError(f"{name} is for one process: each would carry perturbations of its own")
        training = config.training
        set_threads(training.threads)
        torch.manual_seed(training.seed)
        self.network, self.described = make_network(config, self.train_set, place)
        self.engine = config.method.build(examples=len(self.train_set))
        if keep_going:
            self.engine.check_every = 0  # what it would refuse is only to be warned of
        self.selects = self.engine.selects
        self.average = MovingAverage(self.network, training.average) if training.average else None
        self.best: Weights | None = None
        self.loader = make_loader(config, self.train_set, place)
        # A last batch with fewer images than processes would leave some without any: it is left out.
        left_out = self.loader.joint_size(len(self.loader) - 1) < place.world
        self.batches = len(self.loader) - left_out * training.replays
        self.at, self.epoch_sums, self.run_sums = state.Position(), Sums(), Sums()
        self.metrics = StepMetrics(place.device)
        self.initial = InitialPerturbation(config, self.engine, self.loader, place, self.batches)
        self.recorder = Recorder(folder if place.first else None)
        self.stepper = Stepper(
            self.engine, self.network, self.average, self.metrics, config, place, say=self.recorder.note
        )
        self.stepper.keep = self.initial.keep
        self.optimizer = self.stepper.optimizer
        for doubt in config.doubts():
            self.recorder.note(doubt)
        self.display = Display(console, config, self.batches, selects=self.selects)
        self.evaluator = Evaluator(config, place.device, self.display.evaluating)
        self.clock = Clock(place.device, self.stepper)
        self.writer = CheckpointWriter(folder, background=place.device.type == "cuda")
        self.streak = WrongStreak(self.engine)
        self.fingerprint = fingerprint(data)
        self._saved = time.monotonic()
        ends, size = [*range(self.stepper.unit, self.batches, self.stepper.unit), self.batches], self.loader.joint_size
        self._shown_at = max((end for end in ends if size(end - 1) == size(0)), default=self.batches)
        """Mini-batches of an epoch up to the one that the report shows: the last that is whole, and ends its unit."""

    # ------------------------------------------------------------------------------------------- the loop

    def run(self) -> str:
        """Train to the end, evaluate, and say how it ended: "finished", or "stopped by signal N".

        Raises:
            CollapseError: it has collapsed; the last good checkpoint is kept.
        """
        self.display.step = self.at.step
        self.recorder.begin()
        with StopRequest() as stop, self.display, self.writer:
            self.display.stop = None if self.place.together else stop
            try:
                if self.at.epoch < self.config.training.epochs:  # off the clock: loading is no training
                    self.stepper.warm_up(self.loader.epoch(0))
                while self.at.epoch < self.config.training.epochs:
                    self._epoch(stop)
                self._evaluate()
            except StoppedError:
                self.save()
                self.writer.wait()
                return f"stopped by signal {stop.signal}"
            except (DivergedError, CollapseError) as error:
                self._stop_clock()
                self.recorder.log({"kind": "warning", "step": self.at.step, "message": str(error)})
                self._end(f"collapsed: {error}")
                raise CollapseError(str(error)) from None
            except Exception:
                if stop.signal == signal.SIGINT:  # it ends a compiler that is at work, too: that is no error
                    raise KeyboardInterrupt from None
                raise
            self._end("finished")
        return "finished"

    def _epoch(self, stop: StopRequest) -> None:
        """The rest of the epoch, unless the run is asked to stop before its end."""
        training = self.config.training
        self.clock.start()
        for unit in self.units(self.at.epoch, self.at.index):
            before = self.at.index // training.log_every
            out = self.take(unit)
            if self.at.index == self._shown_at:
                self._show(unit[-1], out)
            left = self.batches - self.at.index  # a few of them are no entry of their own, but part of the last one
            due = self.at.index // training.log_every > before and 2 * left >= training.log_every
            if due:
                self._interval()
            if self._should_stop(stop, due or not left):
                self._look_before_saving()
                raise StoppedError
            if time.monotonic() - self._saved > 60 * training.save_minutes and not self.place.together:
                self._look_before_saving()
                self.save()
                self.clock.start()
        self._interval()
        self._stop_clock()
        self._end_of_epoch()

    def units(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """The mini-batches of an epoch from ``start`` on, as steps take them: those of a unit together."""
        unit = []
        for index, (x, y) in enumerate(self.loader.epoch(epoch, start), start):
            unit.append(self.batch(x, y, epoch, index))
            if len(unit) == self.stepper.unit or index + 1 == self.batches:
                yield unit
                unit = []
            if index + 1 == self.batches:
                return

    def batch(self, x: Tensor, y: Tensor, epoch: int, index: int) -> Batch:
        """Mini-batch ``index`` of an epoch as steps take it."""
        which = self.loader.indices(epoch, index) if self.engine.history.examples else None
        return Batch(x, y, self.initial(x, epoch, index), which)

    def take(self, unit: list[Batch]) -> StepOutput:
        """A unit of mini-batches, and the updates that come of it; what the last one gave."""
        first = self.at.step
        out = self.stepper.take(unit, lambda i: self.rate(first + i))
        self.at.step, self.at.index = first + len(unit), self.at.index + len(unit)
        self.display.tick(self.at.epoch, len(unit))
        return out

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        config = self.config
        return rate(config.schedule, config.optimizer.lr, step, self.batches, config.training.epochs)

    def _stop_clock(self) -> None:
        spent, captured = self.clock.stop()
        self.at.seconds += spent
        self.at.epoch_seconds += spent
        self.at.capture_seconds += captured

    def _look_before_saving(self) -> None:
        """Stop the clock, and do not save what has collapsed since the last look."""
        self._stop_clock()
        self.alarm(look_at_loss(self.metrics.peek()))

    def _should_stop(self, stop: StopRequest, due: bool) -> bool:
        if self.place.together and not due:
            return False  # processes must agree, and asking at every step would cost
        asked = self.place.largest(stop.signal or 0)
        if asked:  # else left alone: one that came meanwhile is for the next time
            stop.signal = asked
        return asked > 0

    def _show(self, batch: Batch, out: StepOutput) -> None:
        """Keep a mini-batch for the report, off the clock."""
        self._stop_clock()
        self.recorder.batch(batch.x, batch.y, out, self.train_set.classes, step=self.at.step, epoch=self.at.epoch + 1)
        self.clock.start()

    # ---------------------------------------------------------------------------- records and checkpoints

    def _interval(self) -> None:
        """Read the figures since the last time, record them, and look for trouble."""
        sums = self.metrics.read(self.place.together)
        if not sums.values["examples"]:
            return
        self.epoch_sums += sums
        position = {"step": self.at.step, "epoch": self.at.epoch + self.at.index / self.batches}
        record = {"kind": "step", **position, **self.figures(sums), **self._pace(self.clock.running())}
        self.recorder.log(record)
        self.display.interval(record)
        self.alarm(look_at_loss(sums))
        self.alarm(self.streak.look(sums))

    def alarm(self, problem: str | None) -> None:
        """What a look has found, if anything: the end of the run or, to keep going, one warning of its kind."""
        if problem is not None:
            if not self.keep_going:
                raise CollapseError(problem)
            self.recorder.warn(problem, self.at.step)

    def figures(self, sums: Sums) -> dict[str, Any]:
        """Averages of the steps that were counted, the rate and F_R."""
        return {
            **sums.averages(selects=self.selects, has_clean=self.engine.objective.sees_clean),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "robust_fraction": float(self.engine.robust_fraction.value),
        }

    def _pace(self, running: float = 0.0) -> dict[str, float]:
        elapsed = max(self.at.epoch_seconds + running, 1e-9)
        return {"examples_per_second": self.epoch_sums.values["examples"] / elapsed}

    def _end_of_epoch(self) -> None:
        """Validation, probe, best weights, checkpoint."""
        figures = self.figures(self.epoch_sums)
        self._share_statistics()
        began = time.monotonic()
        clean, robust = self.evaluator.validation(self.network, self.validation_set)
        probe = self.evaluator.probe(self.network, self.train_set)
        record = {
            "kind": "epoch",
            "epoch": self.at.epoch + 1,
            "step": self.at.step,
            "seconds": self.at.epoch_seconds,
            **self._pace(),
            **figures,
            "validation_clean": clean,
            "validation_robust": robust,
            "probe_robust": probe,
            "evaluation_seconds": time.monotonic() - began,
        }
        self.recorder.log(record)
        self.display.epoch(record)
        weak = self.engine.budget.uniform_steps == 0 or self.initial.part_of_eps(self.at.epoch) < 1
        if not weak:  # on purpose
            accuracies, classes = (figures["robust_accuracy"], probe), self.described.num_classes
            self.alarm(look_at_epoch(*accuracies, classes=classes, low_before=self.at.low_probe))
            self.at.low_probe = low_probe(*accuracies, classes=classes)
        self.run_sums += self.epoch_sums
        self.epoch_sums = Sums()
        self.at.epoch, self.at.index, self.at.epoch_seconds = self.at.epoch + 1, 0, 0.0
        if clean is not None and robust is not None and (robust, clean) > (self.at.best, self.at.best_clean):
            self.at.best, self.at.best_clean = robust, clean
            kept = {key: value.to("cpu", copy=True) for key, value in self.network.state_dict().items()}
            self.best = Weights(kept, state.about(self))
        self.save()

    def _share_statistics(self) -> None:
        """Batch-norm statistics of the first process for all: those are what is saved."""
        averaged = [] if self.average is None else self.average.module.buffers()
        self.place.equalize([*self.network.buffers(), *averaged])

    def save(self) -> None:
        """Write a checkpoint."""
        self._saved = time.monotonic()
        if self.place.first:
            self.writer.save(state.checkpoint(self))
        self.place.wait()

    def _evaluate(self) -> None:
        """Accuracy on the test set of all the weights that were kept."""
        if average_statistics(self):
            self.save()
        self._share_statistics()
        for record in self.evaluator.records(state.networks(self), self.test_set, self.at.epoch):
            self.recorder.log(record)

    def _end(self, reason: str) -> None:
        self.writer.wait()
        sums = self.run_sums + self.epoch_sums
        figures = self.figures(sums)
        totals = {"seconds": self.at.seconds, "capture_seconds": self.at.capture_seconds, "epochs": self.at.epoch}
        totals |= {"examples": sums.values["examples"], **{name: figures[name] for name in (*SHARES, "work")}}
        faster = speedups(self.engine.objective, self.config.method, figures)
        self.recorder.log({"kind": "end", "reason": reason, **totals, **faster})
