"""Put finished runs of WRN-34-10 on record, and write results/paper_scale.csv from all that are.

bullettrain reproduce large-network --scale medium --rows trades --set evaluation.search=bf16 --out runs/large
python benchmarks/paper_scale.py runs/large/runs/*
python benchmarks/reproduction_page.py

The records go to results/reproduce/SCALE/records, where scale and row are found by the run's settings. The table has a
line for the last weights and one for the averaged ones. Seconds are those of the median epoch, so that what else ran on
the GPU for a while does not count. ``--note`` is shown with the figures; ``--commit`` corrects the commit of runs that
were started outside a checkout.
"""

import argparse
import csv
import io
import statistics
import sys
from pathlib import Path

from bullettrain.reproduction.records import WEIGHTS, Record, read_records, record_of, run_name
from bullettrain.reproduction.scales import SCALES
from bullettrain.reproduction.studies import LARGE, STUDIES
from bullettrain.run_folder import SHARES, RunFolder

RESULTS = Path(__file__).resolve().parent.parent / "results"
LARGE_SCALES = ("medium", "paper")
ATTACKS = ("clean", "pgd20", "pgd100x10", "autoattack", "apgd")
COLUMNS = (
    *("scale", "row", "seed", "epochs", "weights", *ATTACKS[:4], "autoattack_images", "apgd", "apgd_images"),
    *("boundary", "robust", "outlier", "passes", "seconds_per_epoch", "device", "commit"),
)


def find_row(record: Record) -> tuple[str, str]:
    """Return the scale and the row that a run's settings belong to."""
    for scale in map(SCALES.__getitem__, LARGE_SCALES):
        for row in STUDIES[LARGE].rows(scale):
            if run_name(row.config(scale).replace_section("training", seed=record.seed)) == record.name:
                return scale.name, row.name
    sys.exit(f"{record.name} is no row of the study {LARGE} at scale medium or paper")


def keep(folder: Path, results: Path, *, note: str = "", commit: str = "") -> Record:
    """Write the record of the finished run in ``folder``."""
    record = record_of(folder)
    if not record.finished:
        sys.exit(f"{record.name} is not finished")
    epochs = [entry["seconds"] for entry in RunFolder(folder).records() if entry.get("kind") == "epoch"]
    record.seconds, record.note = statistics.median(epochs) * record.epochs, note
    record.environment["command"] = record.environment["command"].partition(" --out")[0]  # no path of a machine
    record.environment |= {"commit": commit} if commit else {}
    record.write(results / "reproduce" / find_row(record)[0] / "records")
    return record


def lines_of(record: Record) -> list[dict[str, str]]:
    """Return the lines of a record."""
    scale, row = find_row(record)
    about: dict[str, object] = {"scale": scale, "row": row, "seed": record.seed, "epochs": record.epochs}
    about |= {name: f"{100 * record.shares[name]:.2f}" for name in SHARES}
    about |= {"passes": f"{record.work:.2f}", "commit": record.environment["commit"][:7]}
    about |= {"seconds_per_epoch": f"{record.seconds / record.epochs:.2f}", "device": record.environment["device"]}
    lines = []
    for weights, figures in ((WEIGHTS, record.figures), ("averaged", record.averaged)):
        if figures:
            own = {name: f"{100 * figures[name]['accuracy']:.2f}" for name in ATTACKS if name in figures}
            own |= {f"{name}_images": figures[name]["examples"] for name in ("autoattack", "apgd") if name in figures}
            lines.append({**about, "weights": weights, **own})
    return [{column: str(line.get(column, "")) for column in COLUMNS} for line in lines]


def table(results: Path = RESULTS) -> str:
    """Return the text of the table: the lines of all records, in the order in which the rows are trained."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for scale in LARGE_SCALES:
        order = [row.name for row in STUDIES[LARGE].rows(SCALES[scale])]
        records = [lines_of(record) for record in read_records(results / "reproduce" / scale / "records").values()]
        for lines in sorted(records, key=lambda lines: (order.index(lines[0]["row"]), lines[0]["seed"])):
            writer.writerows(lines)
    return text.getvalue()


def main() -> None:
    """Put runs on record, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders of finished runs")
    parser.add_argument("--note", default="", help="a sentence without full stop, shown with the figures")
    parser.add_argument("--commit", default="", help="commit of the runs, if their environment does not tell")
    options = parser.parse_args()
    for folder in options.folders:
        print(keep(folder, RESULTS, note=options.note, commit=options.commit).name)
    (RESULTS / "paper_scale.csv").write_text(table(), encoding="utf-8")


if __name__ == "__main__":
    main()
