"""The training loop."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bullettrain.config import Config, ConfigError
from bullettrain.config.methods import method_name
from bullettrain.data import ImageSet
from bullettrain.data.base import derive_seed
from bullettrain.data.sets import fingerprint
from bullettrain.engine.phases import Batch
from bullettrain.processes import Place, StoppedError, StopRequest
from bullettrain.run_folder import SHARES, CheckpointWriter, RunFolder, Weights, preferred
from bullettrain.step import StepOutput
from bullettrain.training import state
from bullettrain.training.collapse import (
    CollapseError,
    WrongStreak,
    look_at_epoch,
    look_at_loss,
    look_at_robustness,
    look_at_test,
    low_probe,
)
from bullettrain.training.display import Display
from bullettrain.training.evaluator import Evaluator
from bullettrain.training.metrics import StepMetrics, Sums, speedups
from bullettrain.training.optimizer import MovingAverage, average_statistics, rate
from bullettrain.training.recorder import Recorder
from bullettrain.training.setup import InitialPerturbation, make_loader, make_network, set_threads, threads_of
from bullettrain.training.steps import Clock, Stepper
from bullettrain.validation import DivergedError


class Trainer:
    """Trains a network as a config says, and records the run in a folder.

    Args:
        config: of the run.
        folder: of the run.
        place: device and processes.
        data: training, validation and test images.
        console: where to show progress; None: nowhere.
        keep_going: only warn when training collapses.
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
        if config.method.kind.carries_perturbations and place.together:
            name = method_name(vars(config.method))
            raise ConfigError(f"{name} is for one process: each would carry perturbations of its own")
        training = config.training
        set_threads(threads_of(config, place.device))
        torch.manual_seed(training.seed)
        self.network, self.described = make_network(config, self.train_set, place)
        self.engine = config.method.build(dataset_size=len(self.train_set))
        if keep_going:
            self.engine.check_every = 0  # its checks raise
        self.needs_selection = self.engine.needs_selection
        self.average = MovingAverage(self.network, training.average) if training.average else None
        self.best: Weights | None = None
        self.loader = make_loader(config, self.train_set, place)
        self.batches = self.epoch_batches = self._count_batches()
        """Mini-batches of a whole epoch, and of the present one, which may leave examples out."""
        self.at, self.epoch_sums, self.run_sums = state.Position(), Sums(), Sums()
        self.metrics = StepMetrics(place.device)
        self.initial = InitialPerturbation(config, self.engine, self.loader, place, self.batches)
        self.recorder = Recorder(folder if place.first else None)
        parts = self.engine, self.network, self.average, self.metrics
        self.stepper = Stepper(*parts, config, place, on_message=self.recorder.note, on_output=self.initial.keep)
        self.optimizer = self.stepper.optimizer
        group, seed = training.batch_size * self.stepper.unit, derive_seed(training.seed, "leave out")
        self.leave_out = config.method.leaves_out(training.epochs, group, seed)
        for doubt in config.doubts(len(self.train_set), on_cpu=place.device.type == "cpu"):
            self.recorder.note(doubt)
        self.display = Display(console, config, self.batches, with_categories=self.needs_selection)
        self.evaluator = Evaluator(config, place.device, self.display.evaluating)
        self.clock = Clock(place.device, self.stepper)
        self.writer = CheckpointWriter(folder, background=place.device.type == "cuda")
        self.streak = WrongStreak(self.engine)
        self.fingerprint = fingerprint(data)
        self._saved = time.monotonic()

    # ------------------------------------------------------------------------------------------- the loop

    def run(self) -> str:
        """Train to the end and evaluate.

        Returns:
            "finished" or "stopped by signal N".

        Raises:
            CollapseError: training has collapsed; the last good checkpoint is kept.
        """
        self.display.position = self.position
        self.recorder.begin()
        with StopRequest(self.display.stopping) as stop, self.display, self.writer:
            self.display.stop = None if self.place.together else stop
            try:
                if self.at.epoch < self.config.training.epochs:
                    with self.display.warming_up():
                        self.stepper.warm_up(self.loader.epoch(0))  # not counted as training time
                while self.at.epoch < self.config.training.epochs:
                    self._epoch(stop)
                self._evaluate()
            except StoppedError:
                self.save()
                self.writer.wait()
                return f"stopped by signal {stop.signal}"
            except (DivergedError, CollapseError) as error:
                self.clock.stop(self.at)
                self.recorder.log({"kind": "warning", "step": self.at.step, "message": str(error)})
                self._end(f"collapsed: {error}")
                raise CollapseError(str(error)) from None
            except Exception:
                if stop.signal == signal.SIGINT:  # Ctrl-C also ends a compiler's processes, which then fail
                    raise KeyboardInterrupt from None
                raise
            self._end("finished")
        return "finished"

    def _epoch(self, stop: StopRequest) -> None:
        """Train the rest of the epoch.

        Raises:
            StoppedError: the run was asked to stop.
        """
        with self.display.training(self.at.epoch):
            self._train(stop)
        self._end_of_epoch()

    def _train(self, stop: StopRequest) -> None:
        training = self.config.training
        self.clock.start()
        self._choose_examples()
        sampled_at = self._sampled_at()
        for unit in self.units(self.at.epoch, self.at.index):
            before = self.at.index // training.log_every
            out = self.take(unit)
            if self.at.index == sampled_at:
                self._record_batch(unit[-1], out)
            remaining = self.epoch_batches - self.at.index  # a few become part of the last record
            due = self.at.index // training.log_every > before and 2 * remaining >= training.log_every
            if due:
                self._interval()
            if self._should_stop(stop, due or not remaining):
                if self.place.together:  # a checkpoint has the sums of the first process
                    self._interval()
                self._look_before_saving()
                raise StoppedError
            if time.monotonic() - self._saved > 60 * training.save_minutes and not self.place.together:
                self._look_before_saving()
                self.save()
                self.clock.start()
        self._interval()
        self.clock.stop(self.at)

    def _choose_examples(self) -> None:
        """Choose the examples of the epoch; in the middle of one, keep those that the history's weights keep."""
        if self.leave_out is None:
            return
        history = self.engine.history
        if self.at.index == 0:
            self.leave_out.epoch = self.at.epoch
            self.leave_out(history)
        assert history.weight is not None
        self.loader.keep(history.weight > 0)
        self.epoch_batches = self._count_batches()
        self.initial.stretch = self.stretch

    def _count_batches(self) -> int:
        """Return the mini-batches of the loader's epoch.

        A last one with fewer images than processes is left out: every process needs an image.
        """
        too_small = self.loader.joint_size(len(self.loader) - 1) < self.place.world
        return len(self.loader) - too_small * self.config.training.replays

    def _sampled_at(self) -> int:
        """Return the mini-batches up to the one in the report: the last that has full size and ends a unit."""
        last, unit, size = self.epoch_batches, self.stepper.unit, self.loader.joint_size
        return max((end for end in [*range(unit, last, unit), last] if size(end - 1) == size(0)), default=last)

    @property
    def stretch(self) -> float:
        """Mini-batches of a whole epoch for each one of the present epoch."""
        return self.batches / self.epoch_batches

    @property
    def position(self) -> float:
        """Mini-batches of whole epochs up to here. Schedules and the progress bar follow it."""
        return self.at.epoch * self.batches + self.at.index * self.batches / self.epoch_batches

    def units(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """Yield the mini-batches of an epoch from ``start`` on, in lists of up to ``stepper.unit``."""
        batches = enumerate(islice(self.loader.epoch(epoch, start), self.epoch_batches - start), start)
        while unit := [self.batch(x, y, epoch, index) for index, (x, y) in islice(batches, self.stepper.unit)]:
            yield unit

    def batch(self, x: Tensor, y: Tensor, epoch: int, index: int) -> Batch:
        """Return mini-batch ``index`` of an epoch with its initial perturbation and dataset indices."""
        indices = self.loader.indices(epoch, index) if self.engine.history.examples else None
        return Batch(x, y, self.initial(x, epoch, index), indices)

    def take(self, unit: list[Batch]) -> StepOutput:
        """Train on the mini-batches of a unit and return the last one's output."""
        first, stretch = self.position, self.stretch
        out = self.stepper.take(unit, lambda i: self.rate(first + i * stretch))
        self.metrics.left_out += sum(len(batch.y) for batch in unit) * (1 / self.loader.kept_share - 1)
        self.at.step, self.at.index = self.at.step + len(unit), self.at.index + len(unit)
        self.display.tick(self.position)
        return out

    def rate(self, position: float) -> float:
        """Return the learning rate at a :attr:`position`."""
        config = self.config
        return rate(config.schedule, config.optimizer.lr, position, self.batches, config.training.epochs)

    def _look_before_saving(self) -> None:
        """Stop the clock, and raise CollapseError rather than save a collapsed network."""
        self.clock.stop(self.at)
        self.alarm(look_at_loss(self.metrics.peek()))

    def _should_stop(self, stop: StopRequest, due: bool) -> bool:
        if self.place.together and not due:
            return False  # processes have to agree, and asking at every step would be slow
        requested = self.place.largest(stop.signal or 0)
        if requested:  # otherwise a signal that came meanwhile would be lost
            stop.signal = requested
        return requested > 0

    def _record_batch(self, batch: Batch, out: StepOutput) -> None:
        """Keep a mini-batch for the report. Not counted as training time."""
        self.clock.stop(self.at)
        self.recorder.batch(batch.x, batch.y, out, self.train_set.classes, step=self.at.step, epoch=self.at.epoch + 1)
        self.clock.start()

    # ---------------------------------------------------------------------------- records and checkpoints

    def _interval(self) -> None:
        """Record the metrics since the last record and check for collapse."""
        sums = self.metrics.read(self.place.together)
        if not sums["examples"]:
            return
        self.epoch_sums += sums
        position = {"step": self.at.step, "epoch": self.at.epoch + self.at.index / self.epoch_batches}
        record = {"kind": "step", **position, **self.figures(sums), **self._pace()}
        self.recorder.log(record)
        self.display.interval(record)
        self.alarm(look_at_loss(sums))
        self.alarm(self.streak.look(sums))

    def alarm(self, problem: str | None) -> None:
        """Raise CollapseError if there is a problem; with ``keep_going``, warn of each kind once."""
        if problem is not None:
            if not self.keep_going:
                raise CollapseError(problem)
            self.recorder.warn(problem, self.at.step)

    def figures(self, sums: Sums) -> dict[str, Any]:
        """Return the averages of ``sums``, the learning rate and F_R; also the share left out, if any may be."""
        offered = sums["examples"] + sums["left_out"]
        return {
            **({} if self.leave_out is None else {"left_out": sums["left_out"] / (offered or 1.0)}),
            **sums.averages(has_scores=self.needs_selection, has_clean=self.engine.objective.has_clean_logits),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "robust_fraction": float(self.engine.robust_fraction.value),
        }

    def _pace(self) -> dict[str, float]:
        elapsed = max(self.at.epoch_seconds + self.clock.running(), 1e-9)
        return {"examples_per_second": self.epoch_sums["examples"] / elapsed}

    def _end_of_epoch(self) -> None:
        """Validate, probe for catastrophic overfitting, keep the best weights and save a checkpoint."""
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
        weak_on_purpose = self.engine.budget.uniform_steps == 0 or self.initial.part_of_eps(self.at.epoch) < 1
        if not weak_on_purpose:
            accuracies, classes = (figures["robust_accuracy"], probe), self.described.num_classes
            self.alarm(look_at_epoch(*accuracies, classes=classes, low_before=self.at.low_probe))
            self.at.low_probe = low_probe(*accuracies, classes=classes)
        self.run_sums += self.epoch_sums
        self.epoch_sums = Sums()
        self.at.epoch, self.at.index, self.at.epoch_seconds = self.at.epoch + 1, 0, 0.0
        if clean is not None and robust is not None and (robust, clean) > (self.at.best, self.at.best_clean):
            self.at.best, self.at.best_clean = robust, clean
            tensors = {key: value.to("cpu", copy=True) for key, value in self.network.state_dict().items()}
            self.best = Weights(tensors, state.about(self))
        self.save()

    def _share_statistics(self) -> None:
        """Copy the first process's batch-norm statistics, which are saved, to all processes."""
        averaged = [] if self.average is None else self.average.module.buffers()
        self.place.equalize([*self.network.buffers(), *averaged])

    def save(self) -> None:
        """Write a checkpoint."""
        self._saved = time.monotonic()
        if self.place.first:
            self.writer.save(state.checkpoint(self))
        self.place.wait()

    def _evaluate(self) -> None:
        """Evaluate all kept weights on the test set."""
        if average_statistics(self):
            self.save()
        self._share_statistics()
        found: dict[str, dict[str, float]] = {}
        for record in self.evaluator.records(state.networks(self), self.test_set, self.at.epoch):
            self.recorder.log(record)
            found.setdefault(record["weights"], {})[record["attack"]] = record["accuracy"]
        if problem := self._look_at_test(preferred(found), found[preferred(found)]):
            self.recorder.warn(problem, self.at.step)

    def _look_at_test(self, weights: str, accuracies: dict[str, float]) -> str | None:
        """Return a message if test accuracy is at chance, or near zero under the attack after training against one."""
        records = self.folder.records() if self.place.first else []
        losses = [record["loss"] for record in records if record.get("kind") == "epoch" and record["loss"] is not None]
        (_, clean), (attack, robust) = accuracies.items()
        problem = look_at_test(weights, clean, self.test_set, losses)
        if problem is None and self.config.method.attacks:
            problem = look_at_robustness(weights, clean, attack, robust)
        return problem

    def _end(self, reason: str) -> None:
        self.writer.wait()
        sums = self.run_sums + self.epoch_sums
        figures = self.figures(sums)
        totals = {"seconds": self.at.seconds, "capture_seconds": self.at.capture_seconds, "epochs": self.at.epoch}
        examples = sums["examples"] + round(sums["left_out"])  # work counts passes per example of the dataset
        totals |= {"examples": examples, **{name: figures[name] for name in (*SHARES, "work")}}
        faster = speedups(self.engine.objective, self.config.method, figures)
        self.recorder.log({"kind": "end", "reason": reason, **totals, **faster})
