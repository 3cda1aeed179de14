"""Progress of training: a live display on a terminal, a line per epoch elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from bullettrain.config import Config
from bullettrain.processes import StopRequest
from bullettrain.progress import EvaluationBar, progress_bar
from bullettrain.run_folder import SHARES
from bullettrain.terminal import duration, percent

COLOURS = dict(zip(SHARES, ("magenta", "yellow", "cyan"), strict=True))


class Display:
    """Shows the progress of a run.

    Args:
        console: None shows nothing.
        config: of the run.
        steps_per_epoch: for the length of the bar.
        selects: whether to show the shares of the categories.
    """

    def __init__(self, console: Console | None, config: Config, steps_per_epoch: int, *, selects: bool) -> None:
        self.console, self.selects = console, selects
        self.epochs, self.total = config.training.epochs, config.training.epochs * steps_per_epoch
        self.corruption = "on AugMix views" if config.method.objective == "augmix" else "under PGD"
        self.shown = console is not None and console.is_terminal
        self.progress = progress_bar(console or Console(quiet=True))
        self.bar = self.progress.add_task("starting", total=self.total)
        self.stop: StopRequest | None = None
        self.position, self.detail, self.validation = 0.0, Text(overflow="fold"), ""
        # Beside the bar the figures would not fit into 80 columns.
        self.live = Live(Group(self.progress, self.detail), console=self.progress.console, refresh_per_second=8)

    def __enter__(self) -> Display:
        self.progress.update(self.bar, completed=self.position)
        if self.shown:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def tick(self, epoch: int, position: float) -> None:
        """Advance the bar to ``position``, in steps of whole epochs; ``epoch`` counts from 0."""
        self.position = position
        self.progress.update(self.bar, completed=position, description=f"epoch {epoch + 1}/{self.epochs}")

    def interval(self, record: Mapping[str, Any]) -> None:
        """Update the live line."""
        self.detail.plain = ""
        self.detail.append_text(Text.from_markup("  ".join(self._figures(record, colour=True))))

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Show the figures of an epoch, in the live line or as a printed line."""
        if record.get("validation_robust") is not None:
            clean, robust = (percent(record[f"validation_{kind}"]) for kind in ("clean", "robust"))
            self.validation = f"validation {clean}, {self.corruption} {robust}"
        if self.shown:
            self.interval(record)
        elif self.console is not None:
            remaining = (record["seconds"] + record["evaluation_seconds"]) * (self.epochs - record["epoch"])
            parts = [f"epoch {record['epoch']}/{self.epochs}", f"step {record['step']}", *self._figures(record)]
            self.console.print("  ".join([*parts, f"{duration(remaining)} left"]), soft_wrap=True)

    def _figures(self, record: Mapping[str, Any], *, colour: bool = False) -> list[str]:
        loss = "–" if record["loss"] is None else f"{record['loss']:.3f}"
        parts = [f"loss {loss}", f"lr {record['lr']:.2g}", f"{record['examples_per_second']:.0f} ex/s"]
        if self.selects:
            texts = {name: f"{name} {100 * record[name]:.0f}" for name in SHARES}
            shown = [f"[{COLOURS[name]}]{text}[/]" if colour else text for name, text in texts.items()]
            parts += [" ".join(shown) + " %", f"F_R {record['robust_fraction']:.2f}"]
        return [*parts, self.validation] if self.validation else parts

    def evaluating(self, what: str, total: int) -> EvaluationBar:
        """Return a progress bar for an evaluation of ``total`` images."""
        return EvaluationBar(self.progress, what, total, self.stop)
