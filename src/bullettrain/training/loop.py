"""The training loop: batches in, steps of the engine, checkpoints and records out."""

from __future__ import annotations

import copy
import itertools
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn

from bullettrain.attacks.state import training as in_training
from bullettrain.checks import DivergedError
from bullettrain.config.sections import Config
from bullettrain.config.settings import ConfigError
from bullettrain.data import ImageSet
from bullettrain.data.sets import fingerprint
from bullettrain.engine.phases import Batch
from bullettrain.models.external import is_external
from bullettrain.objectives import AdversarialObjective, AugMix
from bullettrain.processes import Place, StoppedError, StopRequest
from bullettrain.run_folder import RunFolder, read_weights
from bullettrain.step import StepOutput
from bullettrain.training import checkpoint
from bullettrain.training.average import ENOUGH, MovingAverage, norms, statistics_anew
from bullettrain.training.checkpoint import Position
from bullettrain.training.clock import Clock
from bullettrain.training.collapse import Alarm, CollapseError, WrongStreak, look_at_epoch, look_at_loss
from bullettrain.training.display import Display
from bullettrain.training.judge import Judge, speedups
from bullettrain.training.optim import rate
from bullettrain.training.records import Recorder
from bullettrain.training.setup import Shape, check_fits, make_loader, make_network
from bullettrain.training.starts import Starts
from bullettrain.training.steppers import Stepper, in_half
from bullettrain.training.tally import Counts, Tally
from bullettrain.training.writer import Writer


class Trainer:
    """One run: from a config and a folder to a trained network."""

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
        self.config, self.folder, self.place = config, folder, place
        self.train_set, self.validation_set, self.test_set = data
        if config.method.carry and place.together:
            raise ConfigError("method.carry (Free) is for one process: each would carry a perturbation of its own")
        training = config.training
        if training.threads:
            torch.set_num_threads(training.threads)
        torch.manual_seed(training.seed)
        self.shape = Shape.of(self.train_set, config.network.name)
        network = make_network(config.network, self.shape)
        if is_external(config.network.name):
            check_fits(network, config.network.name, self.train_set)
        self.network = network.to(place.device)
        if training.channels_last:
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.engine = config.method.engine(examples=len(self.train_set))
        if keep_going:
            self.engine.check_every = 0  # what it would refuse is only to be warned of
        self.selects = self.engine.budget.uniform_steps is None
        self.average = MovingAverage(self.network, training.average) if training.average else None
        self.loader = make_loader(config, self.train_set, place)
        # A last batch with fewer images than processes would leave some without any: it is left out.
        left_out = self.loader.joint_size(len(self.loader) - 1) < place.world
        self.batches = len(self.loader) - left_out * training.replays
        self.at = Position()
        self.tally = Tally(place.device)
        self.epoch_counts, self.run_counts = Counts(), Counts()
        self.starts = Starts(config, self.engine, self.loader, place, self.batches)
        self.display = Display(
            console,
            epochs=training.epochs,
            steps_per_epoch=self.batches,
            done=0,
            selects=self.selects,
            corruption="on AugMix views" if isinstance(self.engine.objective, AugMix) else "under PGD",
        )
        self.notes: list[str] = []
        """What cannot be had here, a line each: steps that are not captured, updates that are not compiled."""
        self.stepper = Stepper(self.engine, self.network, self.average, self.tally, config, place, say=self._say)
        self.optimizer = self.stepper.optimizer
        for note in config.doubts():
            self._say(note)
        self.clock = Clock(place.device, self.stepper)
        self.judge = Judge(config, place.device, self.display)
        self.recorder = Recorder(folder if place.first else None, self.notes)
        self.writer = Writer(folder, aside=place.device.type == "cuda")
        self.alarm = Alarm(self._warn if keep_going else None)
        attacks = isinstance(self.engine.objective, AdversarialObjective)
        by_class = self.selects and not self.engine.selects_by_last  # else who is wrong now is known an epoch later
        self.streak = WrongStreak(selects=by_class, has_clean=self.engine.objective.has_clean_term, attacks=attacks)
        self.fingerprint = fingerprint(data)
        self._saved, self._saving = time.monotonic(), 0.0
        self._shown_at = self._last_whole()

    # ------------------------------------------------------------------------------------------- the loop

    def run(self) -> str:
        """Train to the end, evaluate, and say how it ended: "finished", or "stopped by signal N".

        A collapse raises :class:`CollapseError`, with the last good checkpoint kept.
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
                self.clock.stop(self.at)
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
            out = self._take(unit)
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
        self.clock.stop(self.at)
        self._end_of_epoch()

    def _look_before_saving(self) -> None:
        """Stop the clock, and do not save what has collapsed since the last look."""
        self.clock.stop(self.at)
        self.alarm(look_at_loss(self.tally.peek()))

    def _take(self, unit: list[Batch]) -> StepOutput:
        """A unit of mini-batches, and the updates that come of it; what the last one gave."""
        at, first = self.at, self.at.step
        out = self.stepper.take(unit, lambda i: self._rate(first + i))
        for _ in unit:
            at.step, at.index = at.step + 1, at.index + 1
            self.display.tick(at.epoch)
        return out

    def batch(self, x: Tensor, y: Tensor, epoch: int, index: int) -> Batch:
        """Mini-batch ``index`` of an epoch as steps take it."""
        which = self.loader.indices(epoch, index) if self.engine.history.examples else None
        return Batch(x, y, self.starts(x, epoch, index), which)

    def _show(self, batch: Batch, out: StepOutput) -> None:
        """Keep a mini-batch for the report, off the clock."""
        self.clock.stop(self.at)
        self.recorder.batch(batch.x, batch.y, out, self.train_set.classes, step=self.at.step, epoch=self.at.epoch + 1)
        self.clock.start()

    def _last_whole(self) -> int:
        """Mini-batches of an epoch up to the one that the report shows: the last that is whole, and ends its unit."""
        ends, size = [*range(self.stepper.unit, self.batches, self.stepper.unit), self.batches], self.loader.joint_size
        return max((end for end in ends if size(end - 1) == size(0)), default=self.batches)

    def _rate(self, step: int) -> float:
        config = self.config
        return rate(config.schedule, config.optimizer.lr, step, self.batches, config.training.epochs)

    # ------------------------------------------------------------------------------------------ in between

    def _interval(self) -> None:
        """Read the figures since the last time, record them, and look for trouble."""
        counts = self.tally.read(self.place.together)
        if not counts.sums["examples"]:
            return
        self.epoch_counts += counts
        elapsed = self.at.epoch_seconds + self.clock.running()
        record = {
            "kind": "step",
            "step": self.at.step,
            "epoch": self.at.epoch + self.at.index / self.batches,
            **self._figures(counts),
            "examples_per_second": self.epoch_counts.sums["examples"] / max(elapsed, 1e-9),
        }
        self.recorder.log(record)
        self.display.interval(record)
        self.alarm(look_at_loss(counts))
        self.alarm(self.streak.look(counts))

    def _figures(self, counts: Counts) -> dict[str, Any]:
        has_clean = self.engine.objective.has_clean_term
        return {
            **counts.averages(selects=self.selects, has_clean=has_clean),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "robust_fraction": float(self.engine.robust_fraction.value),
        }

    def _say(self, note: str) -> None:
        self.notes.append(note)
        self.display.message(note)

    def _warn(self, problem: str) -> None:
        self.recorder.log({"kind": "warning", "step": self.at.step, "message": problem})
        self.display.message(Text.assemble(("warning", "bold red"), f" {problem}"))

    def _end_of_epoch(self) -> None:
        """Validation, probe, best weights, checkpoint."""
        counts = self.epoch_counts
        figures = self._figures(counts)
        self._one_set_of_statistics()
        began = time.monotonic()
        clean, robust = self.judge.validation(self.network, self.validation_set)
        probe = self.judge.probe(self.network, self.train_set)
        record = {
            "kind": "epoch",
            "epoch": self.at.epoch + 1,
            "step": self.at.step,
            "seconds": self.at.epoch_seconds,
            "examples_per_second": counts.sums["examples"] / max(self.at.epoch_seconds, 1e-9),
            **figures,
            "validation_clean": clean,
            "validation_robust": robust,
            "probe_robust": probe,
            "judging_seconds": time.monotonic() - began,
            "saving_seconds": self._saving,
        }
        self.recorder.log(record)
        self.display.epoch(record)
        weak = self.engine.budget.uniform_steps == 0 or self.starts.part_of_eps(self.at.epoch) < 1
        if not weak:  # on purpose
            self.alarm(look_at_epoch(figures["robust_accuracy"], probe, classes=self.shape.num_classes))
        self.run_counts += counts
        self.epoch_counts = Counts()
        self.at.epoch, self.at.index, self.at.epoch_seconds = self.at.epoch + 1, 0, 0.0
        if clean is not None and robust is not None and (robust, clean) > (self.at.best, self.at.best_clean):
            self.at.best, self.at.best_clean = robust, clean
            if self.place.first:
                self.folder.save_weights("best", self.network.state_dict(), checkpoint.about(self))
        self.save()

    def _one_set_of_statistics(self) -> None:
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
            self.writer.save(checkpoint.of(self))
        self.place.wait()
        self._saving = time.monotonic() - began

    def resume(self) -> None:
        """Continue from the folder's checkpoint."""
        checkpoint.restore(self, *self.folder.load())
        self.place.wait()  # all have read it
        if self.place.first:
            self.folder.settle(self.at.step)

    # ---------------------------------------------------------------------------------------- the end

    def _evaluate(self) -> None:
        """Accuracy on the test set of all the weights that were kept."""
        self._settle_average()
        self._one_set_of_statistics()
        for record in self.judge.records(self._kept(), self.test_set, self.at.epoch):
            self.recorder.log(record)

    def _settle_average(self) -> None:
        """Batch-norm statistics of the averaged weights themselves: of what training steps would show them now."""
        if self.average is not None:
            with in_training(self.average.module):
                if norms(self.average.module):
                    self._take_statistics(self.average.module)

    def _take_statistics(self, network: nn.Module) -> None:
        """Those of batch norms in plain training steps of some thousand examples, which change nothing else."""
        training, device = self.config.training, self.place.device
        engine = self.config.method.engine(examples=len(self.train_set))
        engine.load_state_dict(self.engine.state_dict())
        engine.budget, engine.check_every = self.engine.budget, 0
        # Each process sees its share, and that of the first counts; a replay shows nothing new.
        distinct = max(2, -(-ENOUGH * self.place.world // training.batch_size))
        shown = range(0, min(self.batches, distinct * training.replays), training.replays)
        images = sum(self.loader.joint_size(index) for index in shown)
        half = in_half(training, device)
        first, _ = next(iter(self.loader.epoch(self.at.epoch)))
        with (
            self.display.evaluating("averaged: statistics", images) as bar,
            torch.autocast(device.type, torch.bfloat16, enabled=half),
            statistics_anew(network, first),
        ):
            for index, (x, y) in enumerate(itertools.islice(self.loader.epoch(self.at.epoch), shown.stop)):
                if index in shown:
                    batch = self.batch(x, y, self.at.epoch, index)
                    engine.step(network, batch.x, batch.y, start=batch.start, index=batch.indices)
                    bar(self.loader.joint_size(index))
        self.save()

    def _kept(self) -> Iterator[tuple[str, nn.Module]]:
        """A network for each of the weights, by their name."""
        kept = {"last": self.network.state_dict()}
        if len(self.validation_set):
            kept["best"] = read_weights(self.folder.path / "best.safetensors")[0]
        if self.average is not None:
            kept["averaged"] = self.average.module.state_dict()
        for name, weights in kept.items():
            network = copy.deepcopy(self.network)
            network.load_state_dict(weights)
            yield name, network

    def _end(self, reason: str) -> None:
        self.writer.wait()
        counts = self.run_counts + self.epoch_counts
        figures = self._figures(counts)
        self.recorder.log(
            {
                "kind": "end",
                "reason": reason,
                "seconds": self.at.seconds,
                "capture_seconds": self.at.capture_seconds,
                "notes": self.notes,
                "epochs": self.at.epoch,
                "examples": counts.sums["examples"],
                **{name: figures[name] for name in ("outlier", "boundary", "robust", "work")},
                **speedups(self.engine.objective, self.config.method.budget(), figures),
            }
        )
