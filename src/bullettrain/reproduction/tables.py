"""The table of a study: our figures beside the paper's, as Markdown and HTML."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bullettrain.evaluation.comparison import Measured
from bullettrain.formatting import DASH, number
from bullettrain.reporting.paper import OWN_CLAIMS
from bullettrain.reporting.report import render
from bullettrain.reproduction.results import CORRELATIONS, CheckResult, Results, Verdict, worst
from bullettrain.reproduction.rows import ROLES, Row, panel_rows
from bullettrain.reproduction.studies import CHANGES, RATIOS, SHARES, Check

HEADINGS = {
    **{name: f"{name} %" for name in ("clean", "corruptions", *SHARES)},
    **{"shares": "boundary / robust / outlier %", "minutes": "minutes", "svar_order": "records in order %"},
    **{"theoretical": "theoretical ×", "work": "work ×", "wall": "wall-clock ×"},
    **{"rank": "rank ρ", "rank_correct": "rank ρ, correct only"},
    **{"robust_rise": "robust share, rise", "outlier_fall": "outlier share, fall"},
    "boundary_least": "boundary share, below the next",
}
CHANGES_IN_WORDS = {
    "robust_rise": ("robust examples grew by {} points", "robust examples fell by {} points"),
    "outlier_fall": ("outliers fell by {} points", "outliers grew by {} points"),
    "boundary_least": (
        "boundary examples are {} points fewer than the next category",
        "boundary examples are {} points more than the smallest category",
    ),
}
"""Changes of the shares over training in words: above 0, and below."""
GRIDS = ("fig-oracle", "fig-oracle-clean", "fig-oracle-stop")
"""Studies whose rows are the points of three grids."""
COLLAPSED = "†"
MARKS = dict(zip(Verdict, "✓½≈✗·", strict=True))
CLASSES = dict(zip(Verdict, ("holds", "part", "part", "fails", "open"), strict=True))
MARKS_LEGEND = "; ".join(f"{mark} {verdict.value}" for verdict, mark in MARKS.items()) + "."
ERRORS_LEGEND = (
    "The ± of a difference is one standard error. It is paired where the records say which images each network gets "
    "right, and the difference is then over the images that both were evaluated on. With one seed it covers the test "
    "images alone, not how much another seed would differ."
)
LEGEND = (
    f"{MARKS_LEGEND} {ERRORS_LEGEND} A mark is the worst of the claims about a figure; the gain on our own baseline "
    "has a column and marks of its own. Δ is ours less the paper's."
)


@dataclass(frozen=True)
class Column:
    """A column of the table: our figures of a metric, the paper's with the difference, or the gain on the baseline."""

    metric: str
    heading: str
    kind: Literal["ours", "paper", "gain"] = "ours"
    beside: bool = False
    """ours: whether there is a column for the gain; gain: whether there is one for the paper's figure."""


@dataclass(frozen=True)
class Cell:
    """The text of a cell, and the verdict on its claims."""

    text: str
    verdict: Verdict | None = None

    @property
    def marked(self) -> str:
        """The text with the mark of the verdict."""
        return self.text if self.verdict in (None, Verdict.OPEN) else f"{self.text} {MARKS[self.verdict]}"


def heading(results: Results, metric: str) -> str:
    """Return the name of a metric at this scale."""
    return HEADINGS.get(metric) or f"{results.title(metric)} %"


def columns(results: Results) -> Iterator[Column]:
    """Yield the columns of the study. Scale smoke has none for the paper's figures."""
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
    """Return a cell of the table."""
    metric, names = column.metric, parts(column.metric)
    values = results.values(row.name, names)
    if column.kind == "ours":  # mean ± std over seeds
        verdicts = [results.cell(row.name, part, gained=False if column.beside else None) for part in names]
        return Cell(DASH if values is None else " / ".join(map(_figure, values, names)), worst(verdicts))
    if column.kind == "paper":
        if not set(names) <= set(row.paper):
            return Cell(DASH)
        text = " / ".join(_number(row.paper[part], part) for part in names)
        if values is not None:
            gaps = [(part, value.mean - row.paper[part]) for part, value in zip(names, values, strict=True)]
            text += f" ({' / '.join(signed(gap, _digits(gap, part)) for part, gap in gaps)})"
        return Cell(text)
    if row.baseline not in results.rows:
        return Cell("")
    if values is None or (base := results.value(row.baseline, metric)) is None:
        return Cell(DASH)
    text, paper = signed(values[0].above(base).value), results.rows[row.baseline].paper
    if column.beside and metric in row.paper and metric in paper:
        text += f" ({signed(row.paper[metric] - paper[metric])})"
    return Cell(text, results.cell(row.name, metric, gained=True))


def parts(metric: str) -> tuple[str, ...]:
    """Return the metrics that share a column."""
    return SHARES if metric == "shares" else (metric,)


def signed(value: float, digits: int = 2) -> str:
    """Format a number with its sign: +0.97, −0.26."""
    return f"{'+' if value >= 0 else '−'}{abs(value):.{digits}f}"


def _digits(value: float, metric: str) -> int:
    return 1 if metric in SHARES or (metric == "minutes" and value >= 1) else 2


def _number(value: float, metric: str) -> str:
    return number(value, _digits(value, metric))


def _figure(value: Measured, metric: str) -> str:
    return _number(value.mean, metric) + (f" ± {_number(value.std, metric)}" if value.std is not None else "")


# --------------------------------------------------------------------------------------------- claims


def found_in_words(result: CheckResult) -> str:
    """Return the figure of a check: `−0.49 ± 0.27 points`."""
    if result.found is None:
        return "not measured yet"
    check = result.check
    if check.metric in CHANGES:
        return CHANGES_IN_WORDS[check.metric][result.found < 0].format(number(abs(result.found), 1))
    points = check.against
    unit = "×" if check.metric in RATIOS else "" if check.metric in CORRELATIONS else " points" if points else " %"
    error = f" ± {number(result.error)}" if check.against and result.error is not None else ""
    return f"{signed(result.found) if points else number(result.found)}{error}{unit}"


def best_of(results: Results, check: Check) -> str:
    """Return of how many rows a check takes the best: `best of 12 run of 16`."""
    run = sum(results.value(row, check.metric) is not None for row in check.rows)
    return f"best of {run}" if run == len(check.rows) else f"best of {run} run of {len(check.rows)}"


def in_words(results: Results, result: CheckResult) -> str:
    """Describe a check: `TRADES + BT, PGD-20: −0.49 ± 0.27 points (paired; asked: at least −0.26)`."""
    check = result.check
    name = heading(results, check.metric).removesuffix(" %").removesuffix(" ×")
    row = results.rows[check.rows[0]].title if len(check.rows) == 1 else best_of(results, check)
    if check.metric in CHANGES:
        return f"{row}: {found_in_words(result)}"
    text = f"{row}, {name}: {found_in_words(result)}"
    if result.found is None:
        return text
    bound = {"≥": "at least ", "≤": "at most ", "≈": "within "}[check.relation]
    bound += signed(check.offset) if check.against and check.relation != "≈" else number(check.offset)
    kind = ("paired; " if result.paired else "unpaired; ") if check.against and result.error is not None else ""
    if check.against and (len(check.rows) > 1 or check.against != results.rows[check.rows[0]].baseline):
        text += f" against {results.rows[check.against].title}"
    return f"{text} ({kind}asked: {bound})"


def claims(results: Results) -> list[tuple[Verdict, str, list[tuple[Verdict, str]]]]:
    """Return for each claim its verdict, its text, and its checks."""
    rows = []
    for text, asked in results.claims.items():
        verdict, checks = results.verdict(asked)
        measured = any(check.found is not None for check in checks)
        described = [(check.verdict, in_words(results, check)) for check in checks] if measured else []
        own = " (not in the paper)" if text in OWN_CLAIMS else ""
        rows.append((verdict, text + own, described))
    return rows


# ---------------------------------------------------------------------------------------------- pages


def markdown(results: Results, figures: Sequence[tuple[str, str]]) -> str:
    """Return the page of a study as Markdown; ``figures`` are (address, caption) pairs."""
    study = results.study
    lines = [f"# {study.title}", "", f"`{study.name}`, scale {results.scale.name}: {results.scale.about}.", ""]
    if results.settings:
        lines += [f"With {', '.join(f'`{setting}`' for setting in results.settings)} on top.", ""]
    lines += [*table(results), *(["", LEGEND] if results.claims else []), *below(results, figures)]
    return "\n".join(lines) + "\n"


def table(results: Results) -> list[str]:
    """Return the lines of the table as Markdown. Rows that have not been run are named below it."""
    if results.study.name in GRIDS:
        return [*_table(results, ["baseline"]), "", *_grids(results)]
    lines = _table(results, results.rows)
    return [*lines, "", f"Not run yet: {'; '.join(names)}."] if (names := unrun(results)) else lines


def _table(results: Results, names: Iterable[str]) -> list[str]:
    """Return a table of those of the rows that have been run."""
    shown, rows = list(columns(results)), [results.rows[name] for name in names if results.runs.get(name)]
    remarks = {row.name: results.status(row) for row in rows}
    noted = any(remarks.values())
    heads = ["row", *(column.heading for column in shown), *["remark"] * noted]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(['---', *['---:'] * len(shown), *['---'] * noted])}|"]
    for row in rows:
        figures = [cell(results, row, column).marked for column in shown]
        lines.append(f"| {' | '.join([row.title, *figures, *[remarks[row.name]] * noted])} |")
    return lines


def _grids(results: Results) -> list[str]:
    """Return a table for each category without steps: robust accuracy by the steps of the other two."""
    grid, metric = results.scale.grid, results.study.attacks[-1]
    lines, missing = [], len(unrun(results))
    known = [value.mean for name in results.rows if (value := results.value(name, "clean")) is not None]
    about = f"{results.title(metric)} accuracy in % with no steps for one category, over the steps of the other two."
    about += f" Clean accuracy is {number(min(known))} to {number(max(known))} %." if known else ""
    about += f" {COLLAPSED} means that the run ended with a warning of catastrophic overfitting."
    about += f" {DASH} means not run yet: {missing} of {len(results.rows)} rows." if missing else ""
    for zero in ROLES:
        first, second = (role for role in ROLES if role != zero)
        heads = [f"{zero} = 0", *(f"{second} = {count}" for count in grid)]
        lines += ["", f"| {' | '.join(heads)} |", "|---|" + "---:|" * len(grid)]
        rows = iter(panel_rows(results.scale, zero))
        for count in grid:
            cells = [_point(results, row.name, metric) for row in itertools.islice(rows, len(grid))]
            lines.append(f"| {first} = {count} | {' | '.join(cells)} |")
    return [about, *lines]


def _point(results: Results, name: str, metric: str) -> str:
    """Return the figure of a point of a grid."""
    value = results.value(name, metric)
    if value is None:
        return DASH
    return _figure(value, metric) + COLLAPSED * any(run.warnings for run in results.runs[name])


def unrun(results: Results) -> list[str]:
    """Return the titles of the rows that have not been run."""
    return [row.title for row in results.rows.values() if not results.runs[row.name]]


def below(results: Results, figures: Sequence[tuple[str, str]], remarks: Sequence[str] = ()) -> list[str]:
    """Return what follows the table as Markdown: notes, claims, ``remarks`` and figures."""
    lines = [text for note in (results.study.about, *results.notes()) if note for text in ("", note)]
    lines += [""] if results.claims else []
    for verdict, text, checks in claims(results):
        lines.append(f"* {MARKS[verdict]} **{verdict.value}**: {text}")
        lines += [f"  * {MARKS[part]} {description}" for part, description in checks]
    lines += remarks
    for address, caption in figures:
        lines += ["", f"![{results.study.title}]({address})", "", f"*{caption}*"]
    return lines


def html(results: Results, figures: Sequence[tuple[str, str]]) -> str:
    """Return the page of a study as one self-contained HTML file; ``figures`` are (caption, SVG) pairs."""
    shown = list(columns(results))
    rows = [
        (row, [cell(results, row, column) for column in shown], results.status(row)) for row in results.rows.values()
    ]
    used = {cell.verdict for _, cells, _ in rows for cell in cells}
    marked = [verdict for verdict in (Verdict.HOLDS, Verdict.CHANCE, Verdict.FAILS) if verdict in used]
    groups = [list(group) for _, group in itertools.groupby(shown, key=lambda column: column.metric)]
    content = {"groups": groups, "columns": shown, "rows": rows, "claims": claims(results), "figures": figures}
    return render("bullettrain.reproduction", results=results, classes=CLASSES, marked=marked, **content)
