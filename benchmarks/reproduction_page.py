"""Write docs/reproduction.md and its pictures from the recorded runs in results/reproduce.

python benchmarks/reproduction_page.py [--check]
"""

import argparse
import sys
from pathlib import Path

from bullettrain.reproduction import SCALES, STUDIES, figures, tables
from bullettrain.reproduction.records import read_records
from bullettrain.reproduction.results import Results, Verdict

ROOT = Path(__file__).resolve().parent.parent
PAGE, RECORDS = ROOT / "docs" / "reproduction.md", ROOT / "results" / "reproduce"
START, END = "<!-- reproduction: from results/reproduce -->", "<!-- /reproduction -->"


def written(scale: str, *, pictures: bool) -> str:
    """Everything that the records of one scale say, as Markdown; with ``pictures`` they are drawn anew."""
    folder = RECORDS / scale
    records = read_records(folder / "records")
    found = [Results(study, SCALES[scale], records) for study in STUDIES.values()]
    lines = [f"## Scale `{scale}`", "", f"{SCALES[scale].about}.", "", *overview(found)]
    for results in found:
        lines += ["", f"### {results.study.title} (`{results.study.name}`)", ""]
        if not any(results.runs.values()):
            lines.append("Not measured yet.")
            continue
        run = {name: runs for name, runs in results.runs.items() if runs}
        if len(results.rows) > 2 * len(run) and len(results.rows) > 10:
            lines += [f"{len(run)} of {len(results.rows)} rows have been run.", ""]
        lines.append(tables.table(results))
        lines += [text for note in (results.study.about, *results.notes()) if note for text in ("", note)]
        lines += tables.claims(results)
        for name in drawn(results, folder, pictures=pictures):
            lines += ["", f"![{results.study.title}](../results/reproduce/{scale}/{name}.png)"]
    return "\n".join(lines)


def overview(found: list[Results]) -> list[str]:
    """How many claims of each study hold."""
    lines = ["| | " + " | ".join(verdict.value for verdict in Verdict) + " |", "|---|" + "---:|" * len(Verdict)]
    for results in found:
        verdicts = [results.verdict(claim)[0] for claim in results.claims()]
        if verdicts:
            counts = [str(verdicts.count(verdict) or "") for verdict in Verdict]
            lines.append(f"| {results.study.title} | " + " | ".join(counts) + " |")
    return [*lines, "", tables.LEGEND]


def drawn(results: Results, folder: Path, *, pictures: bool) -> list[str]:
    """The names of the study's pictures; without ``pictures``, those that are there."""
    if pictures:
        names = [name for name, _, _ in figures.write(results, folder)]
        for name in names:
            (folder / f"{name}.svg").unlink()  # the page shows the other one
        return names
    return sorted(
        file.stem for file in folder.glob("*.png") if file.stem.startswith(results.study.name) and results.study.figure
    )


def main() -> None:
    """Rewrite the page, or check that it is up to date."""
    parser = argparse.ArgumentParser(description="Write docs/reproduction.md from results/reproduce")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    after = rest.split(END)[1]
    scales = [scale for scale in SCALES if (RECORDS / scale).is_dir()]
    body = "\n\n".join(written(scale, pictures=not check) for scale in scales)
    new = f"{before}{START}\n{body}\n{END}{after}"
    if check:
        sys.exit(
            0
            if new == text
            else f"{PAGE.name} is not what results/reproduce says; run benchmarks/reproduction_page.py without --check"
        )
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
