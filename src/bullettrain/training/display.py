"""What a person sees while it trains: live bars on a terminal, plain lines elsewhere, nothing from other ranks."""

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
    """Progress of a run.

    Args:
        console: None: nothing is shown.
        config, steps_per_epoch: of the run.
        selects: whether there are classes to show.
    """

    def __init__(self, console: Console | None, config: Config, steps_per_epoch: int, *, selects: bool) -> None:
        self.console, self.selects = console, selects
        self.epochs, self.total = config.training.epochs, config.training.epochs * steps_per_epoch
        self.corruption = "on AugMix views" if config.method.objective == "augmix" else "under PGD"
        self.shown = console is not None and console.is_terminal
        self.progress = progress_bar(console or Console(quiet=True))
        self.bar = self.progress.add_task("starting", total=self.total)
        self.stop: StopRequest | None = None
        self.step, self.detail, self.validation = 0, Text(overflow="fold"), ""
        # Figures on a line of their own: beside the bar they would not fit 80 columns.
        self.live = Live(Group(self.progress, self.detail), console=self.progress.console, refresh_per_second=8)

    def __enter__(self) -> Display:
        self.progress.update(self.bar, completed=self.step)
        if self.shown:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def tick(self, epoch: int, steps: int) -> None:
        """So many steps are done; ``epoch`` counts from 0."""
        self.step += steps
        self.progress.update(self.bar, completed=self.step, description=f"epoch {epoch + 1}/{self.epochs}")

    def interval(self, record: Mapping[str, Any]) -> None:
        """New figures for the live line, after the last validation."""
        self.detail.plain = ""
        self.detail.append_text(Text.from_markup("  ".join(self._figures(record, colour=True))))

    def epoch(self, record: Mapping[str, Any]) -> None:
        """An epoch is over: on a terminal the live line says so, elsewhere a line of its own."""
        if record.get("validation_robust") is not None:
            clean, robust = (percent(record[f"validation_{kind}"]) for kind in ("clean", "robust"))
            self.validation = f"validation {clean}, {self.corruption} {robust}"
        if self.shown:
            self.interval(record)
        elif self.console is not None:
            left = (record["seconds"] + record["evaluation_seconds"]) * (self.epochs - record["epoch"])
            parts = [f"epoch {record['epoch']}/{self.epochs}", f"step {record['step']}", *self._figures(record)]
            self.console.print("  ".join([*parts, f"{duration(left)} left"]), soft_wrap=True)

    def _figures(self, record: Mapping[str, Any], *, colour: bool = False) -> list[str]:
        loss = "–" if record["loss"] is None else f"{record['loss']:.3f}"
        parts = [f"loss {loss}", f"lr {record['lr']:.2g}", f"{record['examples_per_second']:.0f} ex/s"]
        if self.selects:
            texts = {name: f"{name} {100 * record[name]:.0f}" for name in SHARES}
            shown = [f"[{COLOURS[name]}]{text}[/]" if colour else text for name, text in texts.items()]
            parts += [" ".join(shown) + " %", f"F_R {record['robust_fraction']:.2f}"]
        return [*parts, self.validation] if self.validation else parts

    def evaluating(self, what: str, total: int) -> EvaluationBar:
        """A bar for an evaluation of ``total`` images."""
        return EvaluationBar(self.progress, what, total, self.stop)
