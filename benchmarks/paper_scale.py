"""Add finished runs of WRN-34-10 to results/paper_scale.csv: a line for the last weights, one for the averaged ones.

bullettrain reproduce large-network --scale medium --rows trades --out runs/large
python benchmarks/paper_scale.py runs/large/runs/* --timed
python benchmarks/reproduction_page.py

Scale and row are found by the run's settings. ``--timed`` says that the runs had the GPU to themselves, so that their
seconds count.
"""

import argparse
import csv
import sys
from pathlib import Path

from bullettrain.reproduction.records import CSV_ATTACKS, CSV_COLUMNS, WEIGHTS, Record, record_of, run_name
from bullettrain.reproduction.scales import SCALES
from bullettrain.reproduction.studies import LARGE, STUDIES

CSV = Path(__file__).resolve().parent.parent / "results" / "paper_scale.csv"
KEY = ("scale", "row", "seed", "weights")


def find_row(record: Record) -> tuple[str, str]:
    """Return the scale and the row that a run's settings belong to."""
    for scale in (SCALES["medium"], SCALES["paper"]):
        for row in STUDIES[LARGE].rows(scale):
            if run_name(row.config(scale).replace_section("training", seed=record.seed)) == record.name:
                return scale.name, row.name
    sys.exit(f"{record.name} is no row of the study {LARGE} at scale medium or paper")


def lines_of(record: Record, *, timed: bool) -> list[dict[str, str]]:
    """Return the lines of a finished run."""
    if not record.finished:
        sys.exit(f"{record.name} is not finished")
    scale, row = find_row(record)
    about: dict[str, object] = {"scale": scale, "row": row, "seed": record.seed, "epochs": record.epochs}
    about |= {name: f"{100 * share:.2f}" for name, share in record.shares.items()}
    about |= {"passes": f"{record.work:.2f}", "commit": record.environment["commit"][:7]}
    about |= {"seconds_per_epoch": f"{record.seconds / record.epochs:.2f}" if timed else ""}
    about |= {"device": record.environment["device"]}
    lines = []
    for weights, figures in ((WEIGHTS, record.figures), ("averaged", record.averaged)):
        if figures:
            accuracies = {name: f"{100 * figures[name]['accuracy']:.2f}" for name in CSV_ATTACKS if name in figures}
            images = {"autoattack_images": figures["autoattack"]["examples"]} if "autoattack" in figures else {}
            lines.append(about | {"weights": weights} | accuracies | images)
    return [{column: str(line.get(column, "")) for column in CSV_COLUMNS} for line in lines]


def add(record: Record, file: Path = CSV, *, timed: bool) -> list[dict[str, str]]:
    """Write the lines of a run in the place of earlier ones of the same row, seed and weights."""
    new = lines_of(record, timed=timed)
    replaced = [[line[name] for name in KEY] for line in new]
    with file.open(encoding="utf-8", newline="") as text:
        others = [line for line in csv.DictReader(text) if [line[name] for name in KEY] not in replaced]
    with file.open("w", encoding="utf-8", newline="") as text:
        writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*others, *new])
    return new


def main() -> None:
    """Add runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--timed", action="store_true", help="the runs had the GPU to themselves")
    options = parser.parse_args()
    for folder in options.folders:
        for line in add(record_of(folder), timed=options.timed):
            print(f"{line['scale']} {line['row']}, {line['weights']}: {line['clean']} clean, {line['pgd20']} PGD-20")


if __name__ == "__main__":
    main()
