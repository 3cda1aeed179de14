"""Progress bars, and words about what takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
)
from rich.text import Text

from bullettrain.processes import StoppedError, StopRequest

LONG_SECONDS = 30.0
"""Without a progress bar, what takes longer than this is told."""
SPEED_SECONDS = 600.0
"""Time over which the speed of a bar is averaged: on a CPU a single step or batch can take a minute."""


@contextmanager
def long_waits(say: Callable[[float], None]) -> Iterator[None]:
    """Call ``say`` with the seconds so far after LONG_SECONDS, and whenever they have doubled, from another thread."""
    done, began, due = threading.Event(), time.monotonic(), LONG_SECONDS

    def wait() -> None:
        nonlocal due
        while not done.wait(due + began - time.monotonic()):
            say(time.monotonic() - began)
            due *= 2

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class _TimeColumn(ProgressColumn):
    """The time left, or the time so far as long as that is unknown."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        minutes, seconds = divmod(int((task.elapsed or 0) if left is None else left), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"
        return Text(f"{clock} {'so far' if left is None else 'left'}", style="progress.remaining")


def progress_bar(console: Console, *, transient: bool = False, percent: bool = False) -> Progress:
    """Return a progress display with name, bar, amount and time.

    Args:
        console: where to show it.
        transient: remove it when it stops.
        percent: show the amount in percent.
    """
    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=None),
        TaskProgressColumn() if percent else MofNCompleteColumn(),
        _TimeColumn(),
        console=console,
        speed_estimate_period=SPEED_SECONDS,
        expand=True,
        transient=transient,
    )


class EvaluationBar:
    """The bar of an evaluation. Call it with the number of images that were finished."""

    def __init__(self, progress: Progress | None, what: str, total: int, stop: StopRequest | None) -> None:
        self.progress, self.stop = progress or Progress(disable=True), stop
        self.bar = self.progress.add_task(what, total=total)
        self.done, self.total = 0, total
        self.to_come: int | None = None

    def __enter__(self) -> EvaluationBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.remove_task(self.bar)

    def __call__(self, images: int) -> None:
        """Advance the bar. Raises StoppedError if the run was asked to stop."""
        if self.stop is not None and self.stop.signal is not None:
            raise StoppedError
        self.done += images
        if self.to_come is not None:
            self.total = self.done + self.to_come
        self.progress.update(self.bar, completed=self.done, total=self.total)

    def partly(self, images: int) -> None:
        """Show progress within the current batch."""
        self.progress.update(self.bar, completed=self.done + images)

    def left(self, images: int) -> None:
        """Set how many images remain after the current batch: lost ones are not attacked again."""
        self.to_come = images
