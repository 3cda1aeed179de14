"""Progress bars of evaluations and of training."""

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


class EvaluationBar:
    """The bar of one evaluation; call it with the number of images done."""

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
        """So many images are done; a run that was asked to stop does not wait for the rest."""
        if self.stop is not None and self.stop.signal is not None:
            raise StoppedError
        self.done += images
        if self.to_come is not None:
            self.total = self.done + self.to_come
        self.progress.update(self.bar, completed=self.done, total=self.total)

    def partly(self, images: int) -> None:
        """So many of the batch under way are done."""
        self.progress.update(self.bar, completed=self.done + images)

    def left(self, images: int) -> None:
        """So many are to come after the batch under way, at most: what is lost is not attacked again."""
        self.to_come = images
