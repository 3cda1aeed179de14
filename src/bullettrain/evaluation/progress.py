"""Progress of an evaluation: one line per result, and a progress bar on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress

from bullettrain import formatting
from bullettrain.evaluation.results import Result
from bullettrain.processes import StopRequest
from bullettrain.progress import EvaluationBar, progress_bar
from bullettrain.terminal import duration


class EvaluationProgress:
    """Shows the progress of an evaluation; prints nothing without a console."""

    def __init__(self, console: Console | None = None, stop: StopRequest | None = None) -> None:
        self.console, self.stop = console, stop
        self.progress: Progress | None = None

    def __enter__(self) -> EvaluationProgress:
        if self.console is not None and self.console.is_terminal:
            self.progress = progress_bar(self.console, transient=True, percent=True)
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def attacking(self, name: str, total: int) -> EvaluationBar:
        """Return the progress bar of an attack of ``total`` passes."""
        return EvaluationBar(self.progress, formatting.attack_name(name), total, self.stop)

    def part(self, name: str, accuracy: float, seconds: float, left: float) -> None:
        """Print the accuracy so far and the time left, if there is no progress bar."""
        if self.progress is None:
            self._print(f"  {name}", share(accuracy), f"{duration(seconds)}, about {duration(left)} left")

    def done(self, result: Result, *, kept: bool) -> None:
        """Print a result, new or ``kept``: `PGD-20  L∞ 0.031  50.41 %  (49.43 to 51.39)  12.3 s`."""
        if result.role == "curve" and self.progress is not None:
            return  # the progress bar is enough
        parts = [formatting.attack_name(result.name)]
        parts += [result.threat_name] if result.threat else []
        parts += [f"curve of {result.examples} images"] if result.role == "curve" else []
        parts += [share(result.accuracy), interval(result.interval)]
        parts += [result.precision] if result.precision != "float32" else []
        self._print(*parts, "from before" if kept else duration(result.seconds))

    def _print(self, *parts: str) -> None:
        if self.console is not None:
            self.console.print("  ".join(parts), soft_wrap=True, highlight=False, markup=False)


def share(value: float) -> str:
    """Format an accuracy with two digits: 50.41 %."""
    return formatting.plain(formatting.percent(value, 2))


def interval(ends: tuple[float, float]) -> str:
    """Format a confidence interval: (49.43 to 51.39)."""
    return f"({100 * ends[0]:.2f} to {100 * ends[1]:.2f})"
