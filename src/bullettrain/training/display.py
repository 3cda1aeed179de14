"""What a person sees while it trains: live bars on a terminal, plain lines elsewhere, nothing from other ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from bullettrain import formatting
from bullettrain.terminal import say
from bullettrain.training.signals import StoppedError, StopRequest
from bullettrain.training.tally import CLASSES

COLOURS = dict(zip(CLASSES, ("magenta", "yellow", "cyan"), strict=True))


def progress_bar(console: Console, *, transient: bool = False, percent: bool = False) -> Progress:
    """A bar with its name, how much is done and the time left; ``transient``: gone when it stops."""
    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=None),
        TaskProgressColumn() if percent else MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=console,
        expand=True,
        transient=transient,
    )


class Display:
    """Progress of a run."""

    def __init__(
        self,
        console: Console | None,
        *,
        epochs: int,
        steps_per_epoch: int,
        done: int,
        selects: bool,
        corruption: str = "under PGD",
    ) -> None:
        self.console, self.corruption = console, corruption
        self.epochs, self.steps_per_epoch, self.selects = epochs, steps_per_epoch, selects
        self.progress: Progress | None = None
        self.bar: TaskID | None = None
        self.live: Live | None = None
        self.stop: StopRequest | None = None
        self.step, self.detail = done, Text(overflow="fold")

    def __enter__(self) -> Display:
        if self.console is not None and self.console.is_terminal:
            self.progress = progress_bar(self.console)
            # Figures on a line of their own: beside the bar they would not fit 80 columns.
            self.live = Live(Group(self.progress, self.detail), console=self.console, refresh_per_second=8)
            self.live.start()
            total = self.epochs * self.steps_per_epoch
            self.bar = self.progress.add_task("starting", total=total, completed=self.step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def tick(self, epoch: int) -> None:
        """One step is done; ``epoch`` counts from 0."""
        self.step += 1
        if self.progress is not None and self.bar is not None:
            self.progress.update(self.bar, completed=self.step, description=f"epoch {epoch + 1}/{self.epochs}")

    def interval(self, record: Mapping[str, Any]) -> None:
        """Fresh figures."""
        parts = [
            f"loss {_number(record['loss'])}",
            f"lr {record['lr']:.2g}",
            f"{record['examples_per_second']:.0f} ex/s",
        ]
        if self.selects:
            parts += [shares(record, colour=True), f"F_R {record['robust_fraction']:.2f}"]
        self.detail.plain = ""
        self.detail.append_text(Text.from_markup("  ".join(parts)))

    def epoch(self, record: Mapping[str, Any]) -> None:
        """An epoch is over: on a terminal the bar says enough, elsewhere one line."""
        if self.console is None or self.progress is not None:
            return
        parts = [
            f"epoch {record['epoch']}/{self.epochs}",
            f"step {record['step']}",
            f"loss {_number(record['loss'])}",
            f"lr {record['lr']:.2g}",
            f"{record['examples_per_second']:.0f} ex/s",
        ]
        if self.selects:
            parts += [shares(record), f"F_R {record['robust_fraction']:.2f}"]
        if record.get("validation_robust") is not None:
            clean, robust = (percent(record[f"validation_{kind}"]) for kind in ("clean", "robust"))
            parts.append(f"validation {clean}, {self.corruption} {robust}")
        left = (record["seconds"] + record["judging_seconds"]) * (self.epochs - record["epoch"])
        parts.append(f"{duration(left)} left")
        self.console.print("  ".join(parts), soft_wrap=True)

    def message(self, text: str | Text) -> None:
        """A line that stays."""
        if self.console is not None:
            say(self.console, text)

    def evaluating(self, what: str, total: int) -> Evaluating:
        """A bar for an evaluation of ``total`` images."""
        return Evaluating(self.progress, what, total, self.stop)


class Evaluating:
    """The bar of one evaluation; call it with the number of images done."""

    def __init__(self, progress: Progress | None, what: str, total: int, stop: StopRequest | None) -> None:
        self.progress, self.what, self.total, self.stop = progress, what, total, stop
        self.bar: TaskID | None = None
        self.done = 0
        self.to_come: int | None = None

    def __enter__(self) -> Evaluating:
        if self.progress is not None:
            self.bar = self.progress.add_task(self.what, total=self.total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress is not None and self.bar is not None:
            self.progress.remove_task(self.bar)

    def __call__(self, images: int) -> None:
        """So many images are done; a run that was asked to stop does not wait for the rest."""
        if self.stop is not None and self.stop.signal is not None:
            raise StoppedError
        self.done += images
        if self.to_come is not None:
            self.total = self.done + self.to_come
        if self.progress is not None and self.bar is not None:
            self.progress.update(self.bar, completed=self.done, total=self.total)

    def partly(self, images: int) -> None:
        """So many of the batch under way are done."""
        if self.progress is not None and self.bar is not None:
            self.progress.update(self.bar, completed=self.done + images)

    def left(self, images: int) -> None:
        """So many are to come after the batch under way, at most: what is lost is not attacked again."""
        self.to_come = images


def shares(record: Mapping[str, Any], *, colour: bool = False) -> str:
    """Shares of outlier, boundary and robust examples in percent."""
    texts = []
    for name in CLASSES:
        text = f"{name} {100 * record[name]:.0f}"
        texts.append(f"[{COLOURS[name]}]{text}[/]" if colour else text)
    return " ".join(texts) + " %"


def percent(share: float | None) -> str:
    """0.8146 as 81.5 %."""
    return formatting.plain(formatting.percent(math.nan if share is None else share))


def duration(seconds: float) -> str:
    """12.3 s, 5 min 12 s, 1 h 23 min."""
    return formatting.plain(formatting.duration(seconds))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
