"""The tables at the end of `bullettrain evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bullettrain.evaluation.paper import paper_figure
from bullettrain.evaluation.results import Entry, Result
from bullettrain.evaluation.specs import threat_in_words
from bullettrain.evaluation.watch import interval, share
from bullettrain.reporting import words
from bullettrain.training.config import Config
from bullettrain.training.display import duration


def show(console: Console, entry: Entry, asked: Sequence[Result], config: Config | None, *, curves: bool) -> None:
    """Everything that was asked for, the worst case, the weakest class, differences, warnings."""
    precisions = list(dict.fromkeys(result.precision for result in asked))
    for precision in precisions:
        console.print(_table(entry, [r for r in asked if r.precision == precision], config, precision, precisions))
    for result in asked:
        if result.corruptions:
            console.print(_corruptions(result))
            console.print(mean_in_words(result), highlight=False, soft_wrap=True)
    for text in (weakest(entry, asked), difference(asked)):
        if text:
            console.print(text, highlight=False, soft_wrap=True)
    for warning in entry.warnings:
        console.print(f"[bold yellow]warning[/] {escape(warning)}", highlight=False, soft_wrap=True)
    if curves and not entry.warnings:
        console.print("no sign of gradient masking", highlight=False, soft_wrap=True)


def _table(
    entry: Entry, results: Sequence[Result], config: Config | None, precision: str, precisions: Sequence[str]
) -> Table:
    papers = {r.key: paper_figure(config, r.name, r.attack.get("eps"), entry.data) for r in results}
    with_paper = any(figure is not None for figure in papers.values())
    title = f"{entry.model}" + (f", {precision}" if len(precisions) > 1 or precision != "float32" else "")
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("attack", "threat", "accuracy", "95 %", *(["paper"] if with_paper else []), "time"):
        side: Literal["left", "right"] = "left" if heading in ("attack", "threat") else "right"
        table.add_column(heading, justify=side, no_wrap=heading != "attack")

    def row(*cells: str, paper: float | None = None, seconds: str = "", style: str | None = None) -> None:
        figures = [share(paper) if paper is not None else ""] if with_paper else []
        table.add_row(*cells, *figures, seconds, style=style)

    for result in results:
        threat = threat_in_words(*result.threat) if result.threat else ""
        row(
            words.attack_name(result.name),
            threat,
            share(result.accuracy),
            _ends(result.interval),
            paper=papers[result.key],
            seconds=duration(result.seconds),
        )
        if result.attack["attack"] == "autoattack":
            for name, left in result.rounds[1:]:
                row(f"  after {name}", "", share(left), "", style="dim")
    for case in entry.worst:
        named = {result.name for result in results}
        if case["precision"] == precision and len(results) > 2 and named.issuperset(case["attacks"]):
            threat = threat_in_words(case["norm"], case["eps"])
            row("worst case", threat, share(case["accuracy"]), _ends(case["interval"]), style="bold")
    return table


def _ends(ends: Sequence[float]) -> str:
    return interval((ends[0], ends[1])).strip("()")


def _corruptions(result: Result) -> Table:
    """Accuracy by corruption and severity."""
    table = Table(box=None, pad_edge=False)
    table.add_column("corruption")
    for heading in ("mean", "1", "2", "3", "4", "5"):
        table.add_column(heading, justify="right")
    for name, values in result.corruptions["accuracy"].items():
        cells = [f"{100 * value:.1f}" for value in (sum(values) / len(values), *values)]
        table.add_row(name.replace("_", " "), *cells)
    return table


def mean_in_words(result: Result) -> str:
    """`mean over 14 of 15, without frost: 73.2 %`."""
    about = result.corruptions
    without = f", without {words.listed([name.replace('_', ' ') for name in about['missing']])}"
    text = f"mean over {about['over']} of 15{without if about['missing'] else ''}: {share(result.accuracy)}"
    return text + (f"; mean corruption error {share(about['mce'])}" if "mce" in about else "")


def weakest(entry: Entry, results: Sequence[Result]) -> str:
    """The classes that the last attack leaves most and least of."""
    attacked = [result for result in results if result.threat and result.per_class]
    if not attacked:
        return ""
    result = attacked[-1]
    shares = [(value, name) for value, name in zip(result.per_class, entry.classes, strict=True) if value is not None]
    if len(shares) < 2:
        return ""
    (low, weak), (high, strong) = min(shares), max(shares)
    attack = words.attack_name(result.name)
    return f"weakest class under {attack}: {weak} {share(low)}; strongest: {strong} {share(high)}"


def difference(results: Sequence[Result]) -> str:
    """How much bf16 differs from float32, where both were run."""
    exact = {str(result.attack): result for result in results if result.precision == "float32"}
    parts = []
    for result in results:
        other = exact.get(str(result.attack))
        if result.precision != "bf16" or other is None:
            continue
        part = f"{words.attack_name(result.name)} {words.points(result.accuracy - other.accuracy, 2)}"
        if result.survived and other.survived:
            differ = int((result.mask != other.mask).sum())
            part += f" ({differ} of {result.examples} images)"
        parts.append(part)
    return "bf16 against float32: " + ", ".join(parts) if parts else ""
