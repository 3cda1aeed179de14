"""Progress of training: a live display on a terminal, a table with a row per epoch elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from bullettrain.config import Config
from bullettrain.processes import StopRequest
from bullettrain.progress import EvaluationBar, long_waits, progress_bar
from bullettrain.run_folder import SHARES
from bullettrain.terminal import duration, percent

COLOURS = dict(zip(SHARES, ("magenta", "yellow", "cyan"), strict=True))
WIDTHS = {"loss": 6, "lr": 7, "ex/s": 6, "F_R": 4, "time left": 10}
"""Widths of columns that are wider than their heading. A row fits into 100 columns."""
ROWS_PER_HEADING = 20
STOPPING = "stopping; this step is finished first"


class Display:
    """Shows the progress of a run.

    Args:
        console: None shows nothing.
        config: of the run.
        steps_per_epoch: for the length of the bar.
        with_categories: whether to show the shares of the categories.
    """

    def __init__(self, console: Console | None, config: Config, steps_per_epoch: int, *, with_categories: bool) -> None:
        self.console, self.with_categories = console, with_categories
        self.epochs, self.total = config.training.epochs, config.training.epochs * steps_per_epoch
        self.augmix, self.rows = config.method.objective == "augmix", 0
        self.shown = console is not None and console.is_terminal
        self.progress = progress_bar(console or Console(quiet=True))
        self.bar = self.progress.add_task("starting", total=self.total)
        self.stop: StopRequest | None = None
        self.position, self.detail, self.validation = 0.0, Text(overflow="fold"), ""
        self.kinds: set[str] = set()
        self.compiles = config.training.compile
        # Beside the bar the figures would not fit into 80 columns.
        self.live = Live(Group(self.progress, self.detail), console=self.progress.console, refresh_per_second=8)

    def __enter__(self) -> Display:
        self.progress.update(self.bar, completed=self.position)
        if self.shown:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def tick(self, position: float) -> None:
        """Advance the bar to ``position``, in steps of whole epochs."""
        self.position = position
        self.progress.update(self.bar, completed=position)

    def stopping(self) -> None:
        """Say that the present step is finished first; called by a signal handler.

        It writes past Python's buffers, which the interrupted code may be writing to.
        """
        if self.shown:  # the bar is drawn by another thread
            self.progress.update(self.bar, description=STOPPING)
        elif self.console is not None:
            with suppress(OSError):  # stderr is closed
                os.write(2, f"{STOPPING}\n".encode())

    @contextmanager
    def told(self, what: str, kind: str = "") -> Iterator[None]:
        """Print a line about ``what`` if it takes long, unless there is a bar, or ``kind`` has occurred before."""
        kind = kind or what

        def say(seconds: float) -> None:
            left = self.progress.tasks[-1].time_remaining
            about = "" if left is None else f", about {duration(left)} left"
            console.print(f"  {what}  {duration(seconds)} so far{about}", soft_wrap=True)

        console = self.progress.console
        silent = self.console is None or self.shown or kind in self.kinds
        self.kinds.add(kind)
        with nullcontext() if silent else long_waits(say):
            yield

    def warming_up(self) -> AbstractContextManager[None]:
        """Name the one-time work before the first epoch."""
        what = "compiling" if self.compiles else "warming up"
        self.progress.update(self.bar, description=what)
        return self.told(what)

    def training(self, epoch: int) -> AbstractContextManager[None]:
        """Name an epoch; ``epoch`` counts from 0."""
        what = f"epoch {epoch + 1}/{self.epochs}"
        self.progress.update(self.bar, description=what)
        return self.told(what, kind="epoch")

    def interval(self, record: Mapping[str, Any]) -> None:
        """Update the live lines."""
        figures = [f"loss {_loss(record)}", f"lr {record['lr']:.2g}", f"{record['examples_per_second']:.0f} ex/s"]
        self.detail.plain = ""  # otherwise the colours of the former text stay
        self.detail.append("  ".join([*figures, *filter(None, [self.validation])]))
        if self.with_categories:
            shares = (f"[{COLOURS[name]}]{name} {100 * record[name]:.0f}[/]" for name in SHARES)
            text = f"\n{' '.join(shares)} %  F_R {record['robust_fraction']:.2f}"
            self.detail.append_text(Text.from_markup(text))

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Show the figures of an epoch, in the live lines or as a printed row."""
        if self.shown:
            if record.get("validation_robust") is not None:
                clean, robust = (percent(record[f"validation_{kind}"]) for kind in ("clean", "robust"))
                self.validation = f"validation {clean}, {'on AugMix views' if self.augmix else 'under PGD'} {robust}"
            self.interval(record)
        elif self.console is not None:
            row = self._row(record)
            widths = [max(len(heading), WIDTHS.get(heading, 0)) for heading in row]
            for cells in [row.keys()] * (self.rows % ROWS_PER_HEADING == 0) + [row.values()]:
                line = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
                self.console.print(line, soft_wrap=True)
            self.rows += 1

    def _row(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Return the cells of an epoch by the headings of their columns."""
        epoch = f"{record['epoch']:>{len(str(self.epochs))}}/{self.epochs}"
        row = {"epoch".ljust(len(epoch)): epoch, "loss": _loss(record), "lr": f"{record['lr']:.2g}"}
        row["ex/s"] = f"{record['examples_per_second']:.0f}"
        if self.with_categories:
            row |= {name: f"{100 * record[name]:.0f} %" for name in SHARES}
            row["F_R"] = f"{record['robust_fraction']:.2f}"
        if record.get("validation_robust") is not None:
            row["val clean"] = percent(record["validation_clean"])
            row["val views" if self.augmix else "val PGD"] = percent(record["validation_robust"])
        remaining = (record["seconds"] + record["evaluation_seconds"]) * (self.epochs - record["epoch"])
        return row | {"time left": duration(remaining)}

    @contextmanager
    def evaluating(self, what: str, total: int) -> Iterator[EvaluationBar]:
        """Show a progress bar for an evaluation of ``total`` images."""
        with EvaluationBar(self.progress, what, total, self.stop) as bar, self.told(what):
            yield bar


def _loss(record: Mapping[str, Any]) -> str:
    return "–" if record["loss"] is None else f"{round(record['loss'], 3) + 0.0:.3f}"  # not -0.000
