"""A study's table: our figure, the paper's and the difference side by side, as Markdown, HTML and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from bullettrain.extras import extra
from bullettrain.reporting.words import DASH, attack_name, number
from bullettrain.reproduction.results import RANKS, Judged, Measured, Results, Verdict, worst
from bullettrain.reproduction.study import RATIOS, SHARES, Check, Row

HEADINGS = {
    **{"clean": "clean %", "corruptions": "corruptions %", "minutes": "minutes"},
    **{"boundary": "boundary %", "robust": "robust %", "outlier": "outlier %"},
    "shares": "boundary / robust / outlier %",
    **{"theoretical": "theoretical ×", "work": "work ×", "wall": "wall-clock ×"},
    **{"rank": "rank ρ", "rank_correct": "rank ρ, correct only"},
    **{"robust_rise": "robust, rise", "outlier_fall": "outlier, fall", "boundary_least": "boundary below next"},
    "svar_order": "in order %",
}
CHANGES = ("robust_rise", "outlier_fall", "boundary_least")
MARKS = {Verdict.HOLDS: "✓", Verdict.PART: "½", Verdict.CHANCE: "≈", Verdict.FAILS: "✗", Verdict.OPEN: "·"}
CLASSES = dict(zip(Verdict, ("holds", "part", "part", "fails", "open"), strict=True))
COLOURED = {
    Verdict.HOLDS: "holds",
    Verdict.CHANCE: "falls short by no more than chance could",
    Verdict.FAILS: "does not hold here",
}
"""What the colour of a cell says."""
LEGEND = (
    "✓ holds, ≈ falls short by no more than chance could (two standard errors), ✗ does not hold here, · not measured "
    "yet. A ± behind a difference is one standard error: paired where it is on record which images each network "
    "keeps, and the difference then of the images that both were judged on, else unpaired; of a single seed it is of "
    "the images alone, and how much another would differ is not in it. A mark is the worst of the claims about that "
    "figure; what a row gains on our own baseline has a column, and marks, of its own. Δ: ours less the paper's."
)
FORM = "The paper's figures stand beside these for the form alone."
"""Of scales that are not like the paper."""


@dataclass(frozen=True)
class Cell:
    """A figure as it is shown."""

    text: str
    verdict: Verdict | None = None
    first: bool = False
    """Whether it begins a group of columns."""


@dataclass(frozen=True)
class Column:
    """A metric of the table, and what is shown beside it."""

    metric: str
    heading: str
    paper: bool
    """Whether the paper has it for any row: then its figure is shown, and ours less it."""
    baseline: bool
    """Whether what a row gains on its own baseline is shown beside it."""


def heading(results: Results, metric: str) -> str:
    """What a column is called at this scale."""
    return HEADINGS.get(metric) or f"{attack_name(results.metric(metric))} %"


def columns(results: Results) -> list[Column]:
    """All that the study shows."""
    found = []
    rows = results.rows.values()
    for metric in results.columns():
        accuracy = metric in results.study.attacks and metric != "clean"
        there = any(paper(row, metric) != DASH for row in rows)
        compared = accuracy and any(row.baseline in results.rows for row in rows)
        found.append(Column(metric, heading(results, metric), there, compared))
    return found


def ours(results: Results, row: Row, metric: str, *, beside: bool = False) -> Cell:
    """Our figure, mean ± std over seeds; ``beside``: what it gains on its baseline has a cell of its own."""
    if metric == "theoretical" and row.paper and "theoretical" not in row.paper:
        return Cell(DASH)  # the paper gives none for methods whose passes are not of one kind
    verdicts = [results.cell(row.name, part, gained=False if beside else None) for part in parts(metric)]
    figures = [_figure(results.value(row.name, part), part) for part in parts(metric)]
    return Cell(DASH if DASH in figures else " / ".join(figures), worst(verdicts))


def gain(results: Results, row: Row, metric: str, *, paper: bool = True) -> Cell:
    """What the row gains on its own baseline, and in brackets what it gains in the ``paper``."""
    if row.baseline not in results.rows:
        return Cell("")
    mine, base = results.value(row.name, metric), results.value(row.baseline, metric)
    if mine is None or base is None:
        return Cell(DASH)
    text = signed(mine.above(base).value)
    theirs = results.rows[row.baseline].paper.get(metric)
    if paper and metric in row.paper and theirs is not None:
        text += f" ({signed(row.paper[metric] - theirs)})"
    return Cell(text, results.cell(row.name, metric, gained=True))


def parts(metric: str) -> tuple[str, ...]:
    """The figures that a column has in each of its cells."""
    return SHARES if metric == "shares" else (metric,)


def paper(row: Row, metric: str) -> str:
    """The paper's figure."""
    if any(part not in row.paper for part in parts(metric)):
        return DASH
    return " / ".join(_number(row.paper[part], part) for part in parts(metric))


def difference(results: Results, row: Row, metric: str) -> str:
    """Ours less the paper's."""
    figures = [results.value(row.name, part) for part in parts(metric)]
    if paper(row, metric) == DASH or None in figures:
        return DASH
    apart = [(part, value.mean - row.paper[part]) for part, value in zip(parts(metric), figures, strict=True) if value]
    return " / ".join(signed(value, _digits(value, part)) for part, value in apart)


def both(results: Results, row: Row, metric: str, form: str = "{} ({})") -> str:
    """The paper's figure, and ours less it."""
    theirs, apart = paper(row, metric), difference(results, row, metric)
    return theirs if apart == DASH else form.format(theirs, apart)


def signed(value: float, digits: int = 2) -> str:
    """With its sign: +0.97, −0.26."""
    return f"{'+' if value >= 0 else '−'}{abs(value):.{digits}f}"


def _digits(value: float, metric: str) -> int:
    return 1 if metric in SHARES or (metric == "minutes" and value >= 1) else 2


def _number(value: float, metric: str) -> str:
    return number(value, _digits(value, metric))


def _figure(value: Measured | None, metric: str) -> str:
    if value is None:
        return DASH
    std = f" ± {_number(value.std, metric)}" if value.std is not None else ""
    return _number(value.mean, metric) + std


def found_in_words(results: Results, judged: Judged) -> str:
    """`PGD-20: −0.49 ± 0.27 points (paired; asked: at least −0.26)`, of one check."""
    check = judged.check
    name = heading(results, check.metric).removesuffix(" %").removesuffix(" ×")
    points = check.against or check.metric in CHANGES
    unit = "×" if check.metric in RATIOS else "" if check.metric in RANKS else " points" if points else " %"
    bound = {"≥": "at least ", "≤": "at most ", "≈": "within "}[check.relation]
    asked = signed(check.offset) if check.against and check.relation != "≈" else number(check.offset)
    row = results.rows[check.rows[0]].title if len(check.rows) == 1 else f"best of {len(check.rows)}"
    if judged.found is None:
        return f"{row}, {name}: not measured yet"
    found = signed(judged.found) if points else number(judged.found)
    error = kind = ""
    if check.against and judged.error is not None:
        error, kind = f" ± {number(judged.error)}", "paired; " if judged.paired else "unpaired; "
    usual = len(check.rows) == 1 and check.against == results.rows[check.rows[0]].baseline
    beside = f" against {results.rows[check.against].title}" if check.against and not usual else ""
    near = "; near enough" if _is_near(judged) else ""
    return f"{row}, {name}: {found}{error}{unit}{beside} ({kind}asked: {bound}{asked}{near})"


def _is_measured(judged: Sequence[Judged]) -> bool:
    return any(part.found is not None for part in judged)


def _is_near(judged: Judged) -> bool:
    """Whether it holds by the allowance alone."""
    return judged.verdict is Verdict.HOLDS and judged.found is not None and not _reached(judged.check, judged.found)


def allowed(verdict: Verdict, judged: Sequence[Judged]) -> str:
    """What is to be said of a claim that holds by the allowance alone."""
    return ", near enough" if verdict is Verdict.HOLDS and any(_is_near(part) for part in judged) else ""


def _reached(check: Check, found: float) -> bool:
    """Whether the paper's own figure is reached, without the allowance."""
    return found >= check.offset if check.relation == "≥" else found <= check.offset if check.relation == "≤" else True


def shown_in_markdown(results: Results, address: str, caption: str) -> list[str]:
    """Lines of a picture with its caption."""
    return ["", f"![{results.study.title}]({address})", "", f"*{caption}*"]


def markdown(results: Results, figures: list[tuple[str, str]]) -> str:
    """The whole page of a study as Markdown; of pictures, names and captions."""
    study = results.study
    lines = [f"# {study.title}", "", f"`{study.name}`, scale {results.scale.name}: {results.scale.about}.", ""]
    if results.settings:
        lines += [f"With {', '.join(f'`{setting}`' for setting in results.settings)} on top.", ""]
    lines += [table(results), *(["", LEGEND] if results.claims() else [])]
    if not results.scale.like_paper and any(column.paper for column in columns(results)):
        lines += ["", FORM]
    lines += [text for note in (study.about, *results.notes()) if note for text in ("", note)]
    lines += claims(results)
    lines += [line for name, caption in figures for line in shown_in_markdown(results, f"{name}.png", caption)]
    return "\n".join(lines) + "\n"


def table(results: Results) -> str:
    """The table as Markdown."""
    shown = columns(results)
    heads, sides = ["row"], ["---"]
    for column in shown:
        heads.append(column.heading)
        heads += ["paper (Δ)"] if column.paper else []
        heads += ["against baseline" + " (paper)" * column.paper] if column.baseline else []
    heads.append("")
    sides += ["---:"] * (len(heads) - 2) + ["---"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "|".join(sides) + "|"]
    for row in results.rows.values():
        cells = [row.title]
        for column in shown:
            cells.append(_marked(ours(results, row, column.metric, beside=column.baseline)))
            cells += [both(results, row, column.metric)] if column.paper else []
            cells += [_marked(gain(results, row, column.metric))] if column.baseline else []
        cells.append(results.status(row))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _marked(cell: Cell) -> str:
    if cell.verdict is None or cell.verdict is Verdict.OPEN:
        return cell.text
    return f"{cell.text} {MARKS[cell.verdict]}"


def claims(results: Results) -> list[str]:
    """The paper's claims, a line each, and below each what was found."""
    lines = [""] if results.claims() else []
    for claim in results.claims():
        verdict, judged = results.verdict(claim)
        lines.append(f"* {MARKS[verdict]} **{verdict.value}**{allowed(verdict, judged)}: {claim.text}")
        if _is_measured(judged):
            lines += [f"  * {MARKS[part.verdict]} {found_in_words(results, part)}" for part in judged]
    return lines


def html(results: Results, figures: list[tuple[str, str]]) -> str:
    """One page that is complete in itself; ``figures`` are (caption, SVG) pairs."""
    with extra("a table as HTML"):
        import jinja2
    shown = columns(results)
    rows: list[dict[str, Any]] = []
    for row in results.rows.values():
        cells: list[Cell] = []
        for column in shown:
            mine = ours(results, row, column.metric, beside=column.baseline)
            cells.append(Cell(mine.text, mine.verdict, first=True))
            cells += [Cell(both(results, row, column.metric, "{} {}"))] if column.paper else []
            cells += [gain(results, row, column.metric)] if column.baseline else []
        rows.append(
            {"title": row.title, "cells": cells, "status": results.status(row), "run": bool(results.runs[row.name])}
        )
    used = {cell.verdict for row in rows for cell in row["cells"]}
    legend = {CLASSES[verdict]: said for verdict, said in COLOURED.items() if verdict in used}
    claims = []
    for claim in results.claims():
        verdict, judged = results.verdict(claim)
        said = [(part.verdict, found_in_words(results, part)) for part in judged] if _is_measured(judged) else []
        claims.append({"text": claim.text + allowed(verdict, judged), "verdict": verdict, "judged": said})
    source = files("bullettrain.reproduction").joinpath("template.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(source).render(
        **{"results": results, "columns": shown, "rows": rows, "claims": claims, "figures": figures},
        **{"classes": CLASSES, "legend": legend, "form": FORM},
    )
