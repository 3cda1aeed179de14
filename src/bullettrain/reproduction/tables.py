"""A study's table: our figure, the paper's and the difference side by side, as Markdown, HTML and for a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bullettrain.evaluation.comparison import Measured
from bullettrain.formatting import DASH, number
from bullettrain.reporting.report import render
from bullettrain.reproduction.results import CORRELATIONS, CheckResult, Results, Verdict, worst
from bullettrain.reproduction.rows import Row
from bullettrain.reproduction.studies import RATIOS, SHARES

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
MARKS = dict(zip(Verdict, "✓½≈✗·", strict=True))
CLASSES = dict(zip(Verdict, ("holds", "part", "part", "fails", "open"), strict=True))
LEGEND = (
    "✓ holds; ≈ falls short by no more than two standard errors; ✗ does not hold here; · not measured yet. The ± of a "
    "difference is one standard error. It is paired where the records say which images each network gets right, and "
    "the difference is then over the images that both were evaluated on. With one seed it covers the test images "
    "alone, not how much another seed would differ. A mark is the worst of the claims about a figure; the gain on our "
    "own baseline has a column and marks of its own. Δ is ours less the paper's."
)


@dataclass(frozen=True)
class Column:
    """What a column shows of a metric: our figure, the paper's and ours less it, or the gain on the row's baseline."""

    metric: str
    heading: str
    kind: Literal["ours", "paper", "gain"] = "ours"
    beside: bool = False
    """Whether the metric has a column for the gain, or, of that column, one for the paper's figure."""


@dataclass(frozen=True)
class Cell:
    """A figure as it is shown."""

    text: str
    verdict: Verdict | None = None

    @property
    def marked(self) -> str:
        """With the mark of its verdict."""
        return self.text if self.verdict in (None, Verdict.OPEN) else f"{self.text} {MARKS[self.verdict]}"


def heading(results: Results, metric: str) -> str:
    """What a metric is called at this scale."""
    return HEADINGS.get(metric) or f"{results.title(metric)} %"


def columns(results: Results) -> Iterator[Column]:
    """All that the study shows; the paper's figures only at a scale that is like the paper's."""
    rows = results.rows.values()
    compared = any(row.baseline in results.rows for row in rows)
    for metric in results.columns:
        gain = compared and metric != "clean" and metric in results.study.attacks
        paper = results.scale.like_paper and any(set(parts(metric)) <= set(row.paper) for row in rows)
        yield Column(metric, heading(results, metric), beside=gain)
        if paper:
            yield Column(metric, "paper (Δ)", "paper")
        if gain:
            yield Column(metric, "against baseline" + " (paper)" * paper, "gain", beside=paper)


def cell(results: Results, row: Row, column: Column) -> Cell:
    """What stands in a column of a row."""
    return {"ours": _ours, "paper": _paper, "gain": _gain}[column.kind](results, row, column)


def _ours(results: Results, row: Row, column: Column) -> Cell:
    """Mean ± std over seeds."""
    names = parts(column.metric)
    verdicts = [results.cell(row.name, part, gained=False if column.beside else None) for part in names]
    figures = [_figure(results.value(row.name, part), part) for part in names]
    return Cell(DASH if DASH in figures else " / ".join(figures), worst(verdicts))


def _paper(results: Results, row: Row, column: Column) -> Cell:
    """The paper's figure, and ours less it."""
    names = parts(column.metric)
    if not set(names) <= set(row.paper):
        return Cell(DASH)
    theirs = " / ".join(_number(row.paper[part], part) for part in names)
    if (mine := results.values(row.name, names)) is None:
        return Cell(theirs)
    apart = [(part, value.mean - row.paper[part]) for part, value in zip(names, mine, strict=True)]
    return Cell(f"{theirs} ({' / '.join(signed(value, _digits(value, part)) for part, value in apart)})")


def _gain(results: Results, row: Row, column: Column) -> Cell:
    """What the row gains on its own baseline, and in brackets what it gains in the paper."""
    metric = column.metric
    if row.baseline not in results.rows:
        return Cell("")
    mine, base = results.value(row.name, metric), results.value(row.baseline, metric)
    if mine is None or base is None:
        return Cell(DASH)
    text, theirs = signed(mine.above(base).value), results.rows[row.baseline].paper.get(metric)
    if column.beside and metric in row.paper and theirs is not None:
        text += f" ({signed(row.paper[metric] - theirs)})"
    return Cell(text, results.cell(row.name, metric, gained=True))


def parts(metric: str) -> tuple[str, ...]:
    """The figures that a column has in each of its cells."""
    return SHARES if metric == "shares" else (metric,)


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
    return _number(value.mean, metric) + (f" ± {_number(value.std, metric)}" if value.std is not None else "")


# --------------------------------------------------------------------------------------------- claims


def found_in_words(result: CheckResult) -> str:
    """`−0.49 ± 0.27 points`, of one check."""
    if result.found is None:
        return "not measured yet"
    check = result.check
    points = check.against or check.metric in CHANGES
    unit = "×" if check.metric in RATIOS else "" if check.metric in CORRELATIONS else " points" if points else " %"
    error = f" ± {number(result.error)}" if check.against and result.error is not None else ""
    return f"{signed(result.found) if points else number(result.found)}{error}{unit}"


def in_words(results: Results, result: CheckResult) -> str:
    """`TRADES + BT, PGD-20: −0.49 ± 0.27 points (paired; asked: at least −0.26)`, of one check."""
    check = result.check
    name = heading(results, check.metric).removesuffix(" %").removesuffix(" ×")
    row = results.rows[check.rows[0]].title if len(check.rows) == 1 else f"best of {len(check.rows)}"
    if result.found is None:
        return f"{row}, {name}: {found_in_words(result)}"
    bound = {"≥": "at least ", "≤": "at most ", "≈": "within "}[check.relation]
    asked = signed(check.offset) if check.against and check.relation != "≈" else number(check.offset)
    kind = ("paired; " if result.paired else "unpaired; ") if check.against and result.error is not None else ""
    usual = len(check.rows) == 1 and check.against == results.rows[check.rows[0]].baseline
    beside = f" against {results.rows[check.against].title}" if check.against and not usual else ""
    near = "; near enough" if result.near else ""
    return f"{row}, {name}: {found_in_words(result)}{beside} ({kind}asked: {bound}{asked}{near})"


def claims(results: Results) -> list[tuple[Verdict, str, str, list[tuple[Verdict, str]]]]:
    """The paper's claims: verdict, whether that is by the allowance, what is claimed, and what each check found."""
    found = []
    for text, asked in results.claims.items():
        verdict, checks = results.verdict(asked)
        allowed = ", near enough" if verdict is Verdict.HOLDS and any(check.near for check in checks) else ""
        measured = any(check.found is not None for check in checks)
        said = [(check.verdict, in_words(results, check)) for check in checks] if measured else []
        found.append((verdict, allowed, text, said))
    return found


# ---------------------------------------------------------------------------------------------- pages


def markdown(results: Results, figures: Sequence[tuple[str, str]]) -> str:
    """The whole page of a study as Markdown; of pictures, addresses and captions."""
    study = results.study
    lines = [f"# {study.title}", "", f"`{study.name}`, scale {results.scale.name}: {results.scale.about}.", ""]
    if results.settings:
        lines += [f"With {', '.join(f'`{setting}`' for setting in results.settings)} on top.", ""]
    lines += [*table(results), *(["", LEGEND] if results.claims else []), *below(results, figures)]
    return "\n".join(lines) + "\n"


def table(results: Results) -> list[str]:
    """The table as Markdown."""
    shown = list(columns(results))
    heads = ["row", *(column.heading for column in shown), ""]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(['---', *['---:'] * len(shown), '---'])}|"]
    for row in results.rows.values():
        figures = " | ".join(cell(results, row, column).marked for column in shown)
        lines.append(f"| {row.title} | {figures} | {results.status(row)} |")
    return lines


def below(results: Results, figures: Sequence[tuple[str, str]], remarks: Sequence[str] = ()) -> list[str]:
    """What stands below the table, as Markdown: notes, claims, ``remarks`` that people wrote, and pictures."""
    lines = [text for note in (results.study.about, *results.notes()) if note for text in ("", note)]
    lines += [""] if results.claims else []
    for verdict, allowed, text, checks in claims(results):
        lines.append(f"* {MARKS[verdict]} **{verdict.value}**{allowed}: {text}")
        lines += [f"  * {MARKS[part]} {said}" for part, said in checks]
    lines += remarks
    for address, caption in figures:
        lines += ["", f"![{results.study.title}]({address})", "", f"*{caption}*"]
    return lines


def html(results: Results, figures: Sequence[tuple[str, str]]) -> str:
    """One page that is complete in itself; ``figures`` are (caption, SVG) pairs."""
    shown = list(columns(results))
    rows = [
        (row, [cell(results, row, column) for column in shown], results.status(row)) for row in results.rows.values()
    ]
    used = {cell.verdict for _, cells, _ in rows for cell in cells}
    marked = [verdict for verdict in (Verdict.HOLDS, Verdict.CHANCE, Verdict.FAILS) if verdict in used]
    groups = [list(group) for _, group in itertools.groupby(shown, key=lambda column: column.metric)]
    about = {"groups": groups, "columns": shown, "rows": rows, "claims": claims(results), "figures": figures}
    return render("bullettrain.reproduction", results=results, classes=CLASSES, marked=marked, **about)
