"""Write docs/reproduction.md, its pictures and a table of docs/accuracy.md from the runs in results/reproduce.

python benchmarks/reproduction_page.py [--check]

What people wrote about a study stands on the page below its claims, between the marks of its remarks, and is kept.
"""

import argparse
import re
import statistics
import sys
from collections import Counter
from pathlib import Path

from bullettrain.reporting.svg import printed
from bullettrain.reproduction import SCALES, STUDIES, figures, tables
from bullettrain.reproduction.records import read_records
from bullettrain.reproduction.results import Results, Verdict

ROOT = Path(__file__).resolve().parent.parent
PAGE, RECORDS = ROOT / "docs" / "reproduction.md", ROOT / "results" / "reproduce"
ACCURACY = ROOT / "docs" / "accuracy.md"
CHOICE = {"plane": ("bt-nr0",), "table-fast": ()}
"""Studies whose rows that table shows, without these: TRADES is what they are set beside."""


def written(scale: str, *, pictures: bool) -> str:
    """Everything that the records of one scale say, as Markdown; with ``pictures`` they are drawn anew."""
    folder, page = RECORDS / scale, PAGE.read_text(encoding="utf-8")
    records = read_records(folder / "records")
    found = [Results(study, SCALES[scale], records) for study in STUDIES.values()]
    lines = [f"## Scale `{scale}`", "", f"{SCALES[scale].about}.", "", *overview(found)]
    for results in found:
        lines += ["", f"### {results.study.title} (`{results.study.name}`)", ""]
        if not any(results.runs.values()):
            lines += ["Not measured yet.", *remarks(page, f"{scale} {results.study.name}")]
            continue
        run = {name: runs for name, runs in results.runs.items() if runs}
        if len(results.rows) > 2 * len(run) and len(results.rows) > 10:
            lines += [f"{len(run)} of {len(results.rows)} rows have been run.", ""]
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
    return ["", "#### Remarks", "", *"\n".join(found).splitlines()] if found else []


def overview(found: list[Results]) -> list[str]:
    """How many claims of each study hold."""
    lines = ["| | " + " | ".join(verdict.value for verdict in Verdict) + " |", "|---|" + "---:|" * len(Verdict)]
    for results in found:
        verdicts = [results.verdict(checks)[0] for checks in results.claims.values()]
        if verdicts:
            counts = [str(verdicts.count(verdict) or "") for verdict in Verdict]
            lines.append(f"| {results.study.title} | " + " | ".join(counts) + " |")
    return [*lines, "", tables.LEGEND]


def drawn(results: Results, folder: Path, *, pictures: bool) -> list[tuple[str, str]]:
    """The names and captions of the study's pictures, whose files are written anew with ``pictures``."""
    if pictures:
        written = [(name, caption) for name, caption, _ in figures.write(results, folder)]
        for name, _ in written:
            (folder / f"{name}.svg").unlink()  # the page shows the other one
        return written
    with printed():
        found = [(results.study.name + picture.suffix, picture.caption) for picture in figures.draw(results)]
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
    said = f"{mine.mean:.1f}"
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
    parser = argparse.ArgumentParser(description="Write docs/reproduction.md and a table of docs/accuracy.md")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    check = parser.parse_args().check
    scales = [scale for scale in SCALES if (RECORDS / scale).is_dir()]
    body = "\n\n".join(written(scale, pictures=not check) for scale in scales)
    marks = REMARKS.format(about="(.*?)")
    if lost := Counter(re.findall(marks, PAGE.read_text(encoding="utf-8"))) - Counter(re.findall(marks, body)):
        sys.exit(f"{PAGE.name}: remarks on {', '.join(lost)} would be lost; is that a study, and is their end marked?")
    for file, name, content in ((PAGE, "reproduction", body), (ACCURACY, "methods", methods())):
        old, new = renewed(file, name, content)
        if not check:
            file.write_text(new, encoding="utf-8")
        elif old != new:
            sys.exit(
                f"{file.name} is not what results/reproduce says; run benchmarks/reproduction_page.py without --check"
            )


if __name__ == "__main__":
    main()
