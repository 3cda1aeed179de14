"""The figures of `bullettrain bench` as a table: for the terminal, and as Markdown."""

from __future__ import annotations

from typing import Any

HEADINGS = {
    "engine": "engine",
    "method": "method",
    "step_ms": "ms/step",
    "spread_ms": "± range",
    "select_ms": "select",
    "attack_ms": "attack",
    "update_ms": "update",
    "epoch_seconds": "s/epoch",
    "examples_per_second": "examples/s",
    "tflops": "TFLOP/s",
    "memory_gib": "GiB",
    "capture_seconds": "capture s",
    "work": "passes",
    "theoretical_speedup": "theoretical ×",
    "work_speedup": "work ×",
    "wall_clock_speedup": "wall-clock ×",
}


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text, in the order of the headings."""
    return [_text(row[key]) for key in HEADINGS]


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def markdown(result: dict[str, Any]) -> str:
    """The table as Markdown."""
    lines = ["| " + " | ".join(HEADINGS.values()) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in result["rows"]]
    return "\n".join(lines)
