"""The training loop: batches in, steps of the engine, checkpoints and records out."""

from __future__ import annotations

import itertools
import logging
import signal
import time
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bullettrain.config import Config, ConfigError
from bullettrain.data import ImageSet
from bullettrain.data.sets import fingerprint
from bullettrain.engine.phases import Batch
from bullettrain.formatting import method_name
from bullettrain.models.external import is_external
from bullettrain.objectives import AdversarialObjective, AugMix
from bullettrain.processes import Place, StoppedError, StopRequest
from bullettrain.run_folder import SHARES, CheckpointWriter, RunFolder, Weights
from bullettrain.step import StepOutput
from bullettrain.training import state
from bullettrain.training.collapse import Alarm, CollapseError, WrongStreak, look_at_epoch, look_at_loss
from bullettrain.training.display import Display
from bullettrain.training.evaluator import Evaluator
from bullettrain.training.initial_perturbation import InitialPerturbation
from bullettrain.training.metrics import Recorder, StepMetrics, Sums, speedups
from bullettrain.training.optimizer import STATISTICS_EXAMPLES, MovingAverage, norms, rate, statistics_anew
from bullettrain.training.setup import check_fits, describe_network, make_loader, make_network, set_threads
from bullettrain.training.state import Position
from bullettrain.training.steps import Clock, Stepper, autocast_dtype
from bullettrain.validation import DivergedError

logger = logging.getLogger(__name__)


class Trainer:
    """One run: from a config and a folder to a trained network.

    Args:
        config, folder, place: of the run.
        data: training, validation and test images.
        console: where progress is shown; None: nowhere.
        keep_going: warn of a collapse, and go on.
        evaluator: makes what accuracy is measured by, from config, device and a maker of progress bars.
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
        evaluator: type[Evaluator] = Evaluator,
    ) -> None:
        self.config, self.folder, self.place = config, folder, place
        self.train_set, self.validation_set, self.test_set = data
        if config.method.kind in ("free", "fgsm-pgi") and place.together:
            name = method_name(vars(config.method))
            raise ConfigError(f"{name} is for one process: each would carry perturbations of its own")
        training = config.training
        if training.threads:
            set_threads(training.threads)
        torch.manual_seed(training.seed)
        self.described = describe_network(config.network, self.train_set)
        network = make_network(self.described)
        if is_external(config.network.name):
            check_fits(network, config.network.name, self.train_set)
        self.network = network.to(place.device)
        if training.channels_last:
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
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
        self.at = Position()
        self.metrics = StepMetrics(place.device)
        self.epoch_sums, self.run_sums = Sums(), Sums()
        self.initial = InitialPerturbation(config, self.engine, self.loader, place, self.batches)
        corruption = "on AugMix views" if isinstance(self.engine.objective, AugMix) else "under PGD"
        self.display = Display(console, training.epochs, self.batches, selects=self.selects, corruption=corruption)
        self.evaluator = evaluator(config, place.device, self.display.evaluating)
        self.recorder = Recorder(folder if place.first else None)
        self.stepper = Stepper(self.engine, self.network, self.average, self.metrics, config, place, say=self._note)
        self.stepper.keep = self.initial.keep
        self.optimizer = self.stepper.optimizer
        for note in config.doubts():
            self._note(note)
        self.clock = Clock(place.device, self.stepper)
        self.writer = CheckpointWriter(folder, background=place.device.type == "cuda")
        self.alarm = Alarm(self._warn if keep_going else None)
        attacks = isinstance(self.engine.objective, AdversarialObjective)
        by_class = self.selects and not self.engine.selects_by_last  # else who is wrong now is known an epoch later
        self.streak = WrongStreak(selects=by_class, has_clean=self.engine.objective.sees_clean, attacks=attacks)
        self.fingerprint = fingerprint(data)
        self._saved, self._saving = time.monotonic(), 0.0
        self._shown_at = self._last_whole()

    # ------------------------------------------------------------------------------------------- the loop

    def run(self) -> str:
        """Train to the end, evaluate, and say how it ended: "finished", or "stopped by signal N".

        Raises:
            CollapseError: it has collapsed; the last good checkpoint is kept.
        """
        self.display.step = self.at.step
        with StopRequest() as stop, self.display, self.recorder, self.writer:
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
        unit: list[Batch] = []
        self.clock.start()
        for x, y in self.loader.epoch(self.at.epoch, self.at.index):
            unit.append(self.batch(x, y, self.at.epoch, self.at.index + len(unit)))
            if len(unit) < self.stepper.unit and self.at.index + len(unit) < self.batches:
                continue
            before = self.at.index // training.log_every
            out = self.take(unit)
            if self.at.index == self._shown_at:
                self._show(unit[-1], out)
            unit = []
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
            if self.at.index == self.batches:
                break
        self._interval()
        self._stop_clock()
        self._end_of_epoch()

    def _stop_clock(self) -> None:
        spent, captured = self.clock.stop()
        self.at.seconds += spent
        self.at.epoch_seconds += spent
        self.at.capture_seconds += captured

    def _look_before_saving(self) -> None:
        """Stop the clock, and do not save what has collapsed since the last look."""
        self._stop_clock()
        self.alarm(look_at_loss(self.metrics.peek()))

    def take(self, unit: list[Batch]) -> StepOutput:
        """A unit of mini-batches, and the updates that come of it; what the last one gave."""
        at, first = self.at, self.at.step
        out = self.stepper.take(unit, lambda i: self.rate(first + i))
        for _ in unit:
            at.step, at.index = at.step + 1, at.index + 1
            self.display.tick(at.epoch)
        return out

    def batch(self, x: Tensor, y: Tensor, epoch: int, index: int) -> Batch:
        """Mini-batch ``index`` of an epoch as steps take it."""
        which = self.loader.indices(epoch, index) if self.engine.history.examples else None
        return Batch(x, y, self.initial(x, epoch, index), which)

    def _show(self, batch: Batch, out: StepOutput) -> None:
        """Keep a mini-batch for the report, off the clock."""
        self._stop_clock()
        self.recorder.batch(batch.x, batch.y, out, self.train_set.classes, step=self.at.step, epoch=self.at.epoch + 1)
        self.clock.start()

    def _last_whole(self) -> int:
        """Mini-batches of an epoch up to the one that the report shows: the last that is whole, and ends its unit."""
        ends, size = [*range(self.stepper.unit, self.batches, self.stepper.unit), self.batches], self.loader.joint_size
        return max((end for end in ends if size(end - 1) == size(0)), default=self.batches)

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        config = self.config
        return rate(config.schedule, config.optimizer.lr, step, self.batches, config.training.epochs)

    # ------------------------------------------------------------------------------------------ in between

    def _interval(self) -> None:
        """Read the figures since the last time, record them, and look for trouble."""
        sums = self.metrics.read(self.place.together)
        if not sums.values["examples"]:
            return
        self.epoch_sums += sums
        elapsed = self.at.epoch_seconds + self.clock.running()
        record = {
            "kind": "step",
            "step": self.at.step,
            "epoch": self.at.epoch + self.at.index / self.batches,
            **self.figures(sums),
            "examples_per_second": self.epoch_sums.values["examples"] / max(elapsed, 1e-9),
        }
        self.recorder.log(record)
        self.display.interval(record)
        self.alarm(look_at_loss(sums))
        self.alarm(self.streak.look(sums))

    def figures(self, sums: Sums) -> dict[str, Any]:
        """Averages of the steps that were counted, the rate and F_R."""
        return {
            **sums.averages(selects=self.selects, has_clean=self.engine.objective.sees_clean),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "robust_fraction": float(self.engine.robust_fraction.value),
        }

    def _note(self, note: str) -> None:
        self.recorder.notes.append(note)
        logger.info(note)

    def _warn(self, problem: str) -> None:
        self.recorder.log({"kind": "warning", "step": self.at.step, "message": problem})
        logger.warning(problem)

    def _end_of_epoch(self) -> None:
        """Validation, probe, best weights, checkpoint."""
        sums = self.epoch_sums
        figures = self.figures(sums)
        self._share_statistics()
        began = time.monotonic()
        clean, robust = self.evaluator.validation(self.network, self.validation_set)
        probe = self.evaluator.probe(self.network, self.train_set)
        record = {
            "kind": "epoch",
            "epoch": self.at.epoch + 1,
            "step": self.at.step,
            "seconds": self.at.epoch_seconds,
            "examples_per_second": sums.values["examples"] / max(self.at.epoch_seconds, 1e-9),
            **figures,
            "validation_clean": clean,
            "validation_robust": robust,
            "probe_robust": probe,
            "evaluation_seconds": time.monotonic() - began,
            "saving_seconds": self._saving,
        }
        self.recorder.log(record)
        self.display.epoch(record)
        weak = self.engine.budget.uniform_steps == 0 or self.initial.part_of_eps(self.at.epoch) < 1
        if not weak:  # on purpose
            self.alarm(look_at_epoch(figures["robust_accuracy"], probe, classes=self.described.num_classes))
        self.run_sums += sums
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

    def _should_stop(self, stop: StopRequest, due: bool) -> bool:
        if self.place.together and not due:
            return False  # processes must agree, and asking at every step would cost
        asked = self.place.largest(stop.signal or 0)
        if asked:  # else left alone: one that came meanwhile is for the next time
            stop.signal = asked
        return asked > 0

    # ---------------------------------------------------------------------------------------- checkpoints

    def save(self) -> None:
        """Write a checkpoint."""
        self._saved = began = time.monotonic()
        if self.place.first:
            self.writer.save(state.checkpoint(self))
        self.place.wait()
        self._saving = time.monotonic() - began

    def resume(self) -> None:
        """Continue from the folder's checkpoint.

        Raises:
            RunError: it is damaged, or does not fit.
        """
        kept = self.folder.load()
        state.restore(self, kept)
        self.place.wait()  # all have read it
        if self.place.first:
            self.folder.cut_metrics(kept.state["metrics_size"])
            self.folder.export(kept)
            state.log_machine(self)

    # ---------------------------------------------------------------------------------------- the end

    def _evaluate(self) -> None:
        """Accuracy on the test set of all the weights that were kept."""
        self._average_statistics()
        self._share_statistics()
        for record in self.evaluator.records(state.networks(self), self.test_set, self.at.epoch):
            self.recorder.log(record)

    def _average_statistics(self) -> None:
        """Give averaged weights batch-norm statistics of their own: of what training steps would show them now.

        They are those of plain training steps of some thousand examples, which change nothing else.
        """
        if self.average is None or not norms(self.average.module.train()):
            return
        training, device, network = self.config.training, self.place.device, self.average.module
        engine = self.config.method.build(examples=len(self.train_set))
        engine.load_state_dict(self.engine.state_dict())
        engine.budget, engine.check_every = self.engine.budget, 0
        # Each process sees its share, and that of the first counts; a replay shows nothing new.
        distinct = max(2, -(-STATISTICS_EXAMPLES * self.place.world // training.batch_size))
        shown = range(0, min(self.batches, distinct * training.replays), training.replays)
        images = sum(self.loader.joint_size(index) for index in shown)
        first, _ = next(iter(self.loader.epoch(self.at.epoch)))
        dtype = autocast_dtype(training, device)
        with (
            self.display.evaluating("averaged: statistics", images) as bar,
            torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None),
            statistics_anew(network, first),
        ):
            for index, (x, y) in enumerate(itertools.islice(self.loader.epoch(self.at.epoch), shown.stop)):
                if index in shown:
                    batch = self.batch(x, y, self.at.epoch, index)
                    engine.step(network, batch.x, batch.y, start=batch.start, index=batch.indices)
                    bar(self.loader.joint_size(index))
        self.save()

    def _end(self, reason: str) -> None:
        self.writer.wait()
        sums = self.run_sums + self.epoch_sums
        figures = self.figures(sums)
        self.recorder.log(
            {
                "kind": "end",
                "reason": reason,
                "seconds": self.at.seconds,
                "capture_seconds": self.at.capture_seconds,
                "epochs": self.at.epoch,
                "examples": sums.values["examples"],
                **{name: figures[name] for name in (*SHARES, "work")},
                **speedups(self.engine.objective, self.config.method, figures),
            }
        )
