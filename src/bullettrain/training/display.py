"""What a person sees while it trains: live bars on a terminal, plain lines elsewhere, nothing from other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    Progress,
    TaskID,
)
from rich.text import Text

from bullettrain.processes import StopRequest
from bullettrain.progress import EvaluationBar, progress_bar
from bullettrain.terminal import duration, percent, say
from bullettrain.training.tally import CLASSES

COLOURS = dict(zip(CLASSES, ("magenta", "yellow", "cyan"), strict=True))


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

    def evaluating(self, what: str, total: int) -> EvaluationBar:
        """A bar for an evaluation of ``total`` images."""
        return EvaluationBar(self.progress, what, total, self.stop)


def shares(record: Mapping[str, Any], *, colour: bool = False) -> str:
    """Shares of outlier, boundary and robust examples in percent."""
    texts = []
    for name in CLASSES:
        text = f"{name} {100 * record[name]:.0f}"
        texts.append(f"[{COLOURS[name]}]{text}[/]" if colour else text)
    return " ".join(texts) + " %"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
