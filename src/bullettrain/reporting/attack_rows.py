"""Results of an evaluation as rows and sentences, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bullettrain.config.sections import Config
from bullettrain.evaluation.results import Entry, Result, worst_cases
from bullettrain.evaluation.specs import threat_in_words
from bullettrain.formatting import attack_name, listed, percent, plain, points
from bullettrain.reporting.paper import paper_figure


@dataclass(frozen=True)
class AttackRow:
    """A row of the table: an attack, a part of AutoAttack, or the worst case over attacks."""

    kind: Literal["attack", "part", "worst"]
    name: str
    threat: str
    accuracy: float
    precision: str
    interval: tuple[float, float] | None = None
    paper: float | None = None
    seconds: float | None = None


def rows(entry: Entry, results: Sequence[Result], config: Config | None) -> list[AttackRow]:
    """Return a row for each result, each part of AutoAttack, and the worst case of each threat."""
    table = []
    for result in results:
        threat = result.threat_name
        part = f", {result.corruptions['over']} of 15" if result.corruptions.get("missing") else ""
        paper = paper_figure(config, result.name, result.attack.get("eps"), entry.data)
        name, measured = attack_name(result.name) + part, (result.interval, paper, result.seconds)
        table.append(AttackRow("attack", name, threat, result.accuracy, result.precision, *measured))
        if result.attack["attack"] in ("autoattack", "apgd"):
            parts = result.rounds[1:]
            table += [AttackRow("part", f"after {name}", threat, left, result.precision) for name, left in parts]
    for case in worst_cases(results):
        threat = threat_in_words(case["norm"], case["eps"])
        table.append(AttackRow("worst", "worst case", threat, case["accuracy"], case["precision"], case["interval"]))
    return table


def difference(results: Sequence[Result], known: Sequence[Result] = ()) -> str:
    """Describe how results in tf32 and bf16 differ from float32 ones, among ``results`` or ``known``; may be empty."""
    exact = {str(r.attack): r for r in (*known, *results) if r.precision == "float32" and r.role == "attack"}
    parts: dict[str, list[str]] = {}
    for result in results:
        other = exact.get(str(result.attack))
        if result.precision == "float32" or other is None:
            continue
        part = f"{attack_name(result.name)} {points(result.accuracy - other.accuracy, 2)}"
        if result.survived and other.survived and result.examples == other.examples:
            part += f" ({int((result.mask != other.mask).sum())} of {result.examples} images)"
        parts.setdefault(result.precision, []).append(part)
    return "; ".join(f"{precision} against float32: {', '.join(part)}" for precision, part in parts.items())


def weakest(entry: Entry, results: Sequence[Result]) -> str:
    """Describe the classes with the lowest and highest accuracy under the strongest attack; may be empty."""
    attacked = [result for result in results if result.threat and result.per_class]
    if not attacked:
        return ""
    result = min(attacked, key=lambda result: result.accuracy)
    shares = [(value, name) for value, name in zip(result.per_class, entry.classes, strict=True) if value is not None]
    (low, weak), (high, strong) = min(shares), max(shares)
    if low == high:
        return ""
    under = f"weakest class under {attack_name(result.name)}"
    return plain(f"{under}: {weak} ({percent(low)}); strongest: {strong} ({percent(high)})")


def mean_in_words(result: Result) -> str:
    """Describe a mean over corruptions: `mean over 14 of 15, without frost: 73.20 %`."""
    details = result.corruptions
    missing = [name.replace("_", " ") for name in details["missing"]]
    without = f", without {listed(missing)}" if missing else ""
    text = f"mean over {details['over']} of 15{without}: {percent(result.accuracy, 2)}"
    return plain(text + (f"; mean corruption error {percent(details['mce'], 2)}" if "mce" in details else ""))
