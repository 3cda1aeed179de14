"""Progress bars."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from bullettrain.processes import StoppedError, StopRequest


def progress_bar(console: Console, *, transient: bool = False, percent: bool = False) -> Progress:
    """Return a progress display with name, bar, amount and remaining time.

    Args:
        console: where to show it.
        transient: remove it when it stops.
        percent: show the amount in percent.
    """
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
