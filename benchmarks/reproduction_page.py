"""Write the pages of the reproduction, their pictures and a table of docs/accuracy.md from the runs that are on record.

They are in results/reproduce; those of scales medium and paper are of the paper's own network.

python benchmarks/reproduction_page.py [--check]

What people wrote about a study stands on its page below the claims, between the marks of its remarks, and is kept.
"""

import argparse
import re
import statistics
import sys
from collections import Counter
from pathlib import Path

from bullettrain.reporting.paper import OWN_CLAIMS
from bullettrain.reporting.plotting import printed
from bullettrain.reproduction import SCALES, STUDIES, figures, tables
from bullettrain.reproduction.records import Record, read_records
from bullettrain.reproduction.results import CheckResult, Results, Verdict
from bullettrain.reproduction.studies import LARGE, Check

ROOT = Path(__file__).resolve().parent.parent
DOCS, RECORDS = ROOT / "docs", ROOT / "results" / "reproduce"
PAGES = {"reproduction_short.md": ("short",), "reproduction_large.md": ("medium", "paper")}
"""The pages with the tables of each scale. reproduction.md has the claims."""
CHOICE = {"plane": ("bt-nr0",), "table-fast": ()}
"""Studies whose rows that table shows, without these: TRADES is what they are set beside."""
OWN = "Not in the paper"
"""The heading of the claims that are this project's."""
MAX_FIGURES = 3
"""Figures of a claim that have room in one cell."""


def on_record(scale: str) -> dict[str, Record]:
    """All runs of a scale."""
    return read_records(RECORDS / scale / "records")


def claims() -> list[str]:
    """Every claim and what came of it: of scale short, and of the paper's own network at the larger scales."""
    small, *large = PAGES["reproduction_short.md"] + PAGES["reproduction_large.md"]
    records = {scale: on_record(scale) for scale in (small, *large)}
    studies = [study for study in STUDIES.values() if study.name != LARGE]
    short = [Results(study, SCALES[small], records[small]) for study in studies]
    verdicts = Counter(results.verdict(checks)[0] for results in short for checks in results.claims.values())
    tally = ", ".join(f"{verdict.value} {verdicts[verdict]}" for verdict in Verdict if verdicts[verdict])
    lines = [f"## Scale `{small}`", "", f"{SCALES[small].about}.", "", f"Claims by verdict: {tally}.", ""]
    lines += [f"| Claim | `{small}` |", "|---|---|"]
    for results in short:
        papers = paragraph([results], own=False)
        lines += [f"| **{results.study.title}** | |", *papers] if papers else []
    lines += [f"| **{OWN}** | |", *(line for results in short for line in paragraph([results], own=True))]
    lines += ["", f"## {STUDIES[LARGE].title}", "", *(f"* `{scale}`: {SCALES[scale].about}." for scale in large), ""]
    wide = {name: [Results(STUDIES[name], SCALES[scale], records[scale]) for scale in large] for name in STUDIES}
    shown = [found for name, found in wide.items() if name == LARGE or any(map(measured, found))]
    blank = " |" * len(large)
    lines += [f"| Claim | {' | '.join(f'`{scale}`' for scale in large)} |", "|---|" + "---|" * len(large)]
    for found in shown:
        lines += [f"| **{found[0].study.title}** |{blank}"] if len(shown) > 1 else []
        lines += paragraph(found, own=False)
    lines += [f"| **{OWN}** |{blank}", *(line for found in shown for line in paragraph(found, own=True)), ""]
    missing = {one.scale.name: "; ".join(tables.unrun(one)) for one in wide[LARGE]}
    lines += [f"* Rows not run yet at `{scale}`: {rows}." for scale, rows in missing.items() if rows]
    return [*lines, "", tables.MARKS_LEGEND + " " + tables.ERRORS_LEGEND]


def measured(results: Results) -> bool:
    """Whether a figure of any claim is known."""
    return any(check.found is not None for checks in results.claims.values() for check in results.verdict(checks)[1])


def paragraph(results: list[Results], *, own: bool) -> list[str]:
    """The lines of a study's claims, with a verdict at each scale: this project's ``own``, or the paper's."""
    texts = [text for text in results[0].claims if (text in OWN_CLAIMS) == own]
    return [f"| {text} | {' | '.join(told(one, one.claims[text]) for one in results)} |" for text in texts]


def told(results: Results, checks: list[Check]) -> str:
    """A claim's verdict, and the figures that it rests on."""
    verdict, found = results.verdict(checks)
    if all(check.found is None for check in found):
        return f"{tables.MARKS[verdict]} {verdict.value}"
    said = [figure_of(results, check, marked=len({check.verdict for check in found}) > 1) for check in found]
    if len(said) > MAX_FIGURES:
        parts = Counter(check.verdict for check in found)
        said = [f"of {len(found)} parts {', '.join(f'{parts[v]} {tables.MARKS[v]}' for v in Verdict if parts[v])}"]
    return f"{tables.MARKS[verdict]} {verdict.value}: {'; '.join(said)}"


def figure_of(results: Results, found: CheckResult, *, marked: bool) -> str:
    """The figure of a check, ``marked`` with its verdict."""
    best = f" ({tables.best_of(results, found.check)})" if len(found.check.rows) > 1 else ""
    return tables.found_in_words(found) + best + f" {tables.MARKS[found.verdict]}" * marked


def written(scale: str, page: str, *, pictures: bool) -> str:
    """Everything that is on record of one scale, as Markdown; with ``pictures`` they are drawn anew.

    ``page`` is the page as it is, with the remarks of people.
    """
    folder, records, large = RECORDS / scale, on_record(scale), scale != "short"
    found = [Results(study, SCALES[scale], records) for study in STUDIES.values() if (study.name == LARGE) == large]
    lines = [f"## Scale `{scale}`", "", f"{SCALES[scale].about}."] if large else [tables.LEGEND]
    for results in found:
        lines += ["", f"## {results.study.title} (`{results.study.name}`)", ""] if not large else [""]
        if not any(results.runs.values()):
            lines += ["Not measured yet." + (f" In order: {'; '.join(tables.unrun(results))}." if large else "")]
            lines += remarks(page, f"{scale} {results.study.name}")
            continue
        shown = drawn(results, folder, pictures=pictures)
        addresses = [(f"../results/reproduce/{scale}/{name}.png", caption) for name, caption in shown]
        lines += [
            *tables.table(results),
            *tables.below(results, addresses, remarks(page, f"{scale} {results.study.name}")),
        ]
    return "\n".join(lines)


REMARKS = "<!-- remarks: {about} -->"


def remarks(page: str, about: str) -> list[str]:
    """The lines of ``page`` that people wrote ``about`` a study, with the marks around them, if there are any."""
    found = re.findall(rf"{REMARKS.format(about=about)}\n(?:(?!<!-- remarks:).)*?<!-- /remarks -->", page, re.DOTALL)
    return ["", "### Remarks", "", *"\n".join(found).splitlines()] if found else []


def drawn(results: Results, folder: Path, *, pictures: bool) -> list[tuple[str, str]]:
    """The names and captions of the study's pictures, whose files are written anew with ``pictures``."""
    if pictures:
        written = [(name, caption) for name, caption, _ in figures.write(results, folder)]
        for name, _ in written:
            (folder / f"{name}.svg").unlink()  # the page shows the other one
        return written
    with printed():
        found = [(plate.name, plate.caption) for plate in figures.draw(results)]
    return [(name, caption) for name, caption in found if (folder / f"{name}.png").is_file()]


def methods() -> str:
    """What each method reaches beside TRADES, and what it costs, the dearest first; those that were run."""
    records = read_records(RECORDS / "short" / "records")
    found: dict[str, tuple[float, str]] = {}
    for name, hidden in CHOICE.items():
        results = Results(STUDIES[name], SCALES["short"], records)
        for row in results.rows.values():
            minutes = results.value(row.name, "minutes")
            if row.name in hidden or minutes is None:
                continue
            runs = results.runs[row.name]
            work = statistics.fmean(run.work for run in runs)
            beside = [apart(results, row.name, metric) for metric in ("clean", "pgd20", "autoattack")]
            cells = [row.title.replace(" λ=1/6", ""), f"{minutes.mean:.2f}", f"{work:.1f}", *beside]
            found[runs[0].name] = minutes.mean, f"| {' | '.join(cells)} |"
    head = ["method", "minutes", "passes an example", "clean %", "PGD-20 %", "AutoAttack %"]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *(line for _, line in sorted(found.values(), reverse=True))])


def apart(results: Results, row: str, metric: str) -> str:
    """A row's accuracy, in brackets where it is of some of the images, and how far it is from TRADES on the same."""
    mine, base = results.value(row, metric), results.value("trades", metric)
    if mine is None or base is None:
        return "–"
    said = f"{mine.mean + 1e-9:.1f}"  # halves upwards, as benchmarks/plane.py
    if any(figure.get("among") for figure in mine.figures):
        said = f"({said})"
    if row == "trades":
        return said
    gained = mine.above(base)
    return f"{said}, {tables.signed(round(gained.value, 1))[:-1]} ± {gained.error:.1f}"


def renewed(file: Path, name: str, body: str) -> tuple[str, str]:
    """A file's text, and what it is to be: with ``body`` between the marks of ``name``."""
    start, end = f"<!-- {name}: from results/reproduce -->", f"<!-- /{name} -->"
    text = file.read_text(encoding="utf-8")
    before, rest = text.split(start)
    return text, f"{before}{start}\n{body}\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Rewrite the pages, or check that they are up to date."""
    parser = argparse.ArgumentParser(description="Write the pages of the reproduction and a table of docs/accuracy.md")
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    check = parser.parse_args().check
    contents = {"reproduction.md": ("reproduction", "\n".join(claims())), "accuracy.md": ("methods", methods())}
    for name, scales in PAGES.items():
        page = (DOCS / name).read_text(encoding="utf-8")
        body = "\n\n".join(written(scale, page, pictures=not check) for scale in scales)
        marks = REMARKS.format(about="(.*?)")
        if lost := Counter(re.findall(marks, page)) - Counter(re.findall(marks, body)):
            sys.exit(f"{name}: remarks on {', '.join(lost)} would be lost; is that a study, and is their end marked?")
        contents[name] = "reproduction", body
    for name, (mark, body) in contents.items():
        old, new = renewed(DOCS / name, mark, body)
        if not check:
            (DOCS / name).write_text(new, encoding="utf-8")
        elif old != new:
            sys.exit(f"{name} is not what results/reproduce says; run benchmarks/reproduction_page.py without --check")


if __name__ == "__main__":
    main()
