"""Train every baseline on the digits, and write the table of docs/baselines.md from what was recorded.

python benchmarks/baselines_table.py --run    trains what results/baselines.json does not have yet, then writes
python benchmarks/baselines_table.py [--check]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bullettrain.config import recipe
from bullettrain.config.methods import with_method
from bullettrain.config.sections import Config
from bullettrain.processes import Place
from bullettrain.run_folder import RunFolder, environment
from bullettrain.training.run import train

ROOT = Path(__file__).resolve().parent.parent
PAGE, RECORD = ROOT / "docs" / "baselines.md", ROOT / "results" / "baselines.json"
START, END = "<!-- measured: from results/baselines.json -->", "<!-- /measured -->"
SEEDS = (0, 1, 2)
PGD, MART = ("objective=pgd-at", "beta=null"), ("objective=mart",)
ROWS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "PGD-AT, 10 steps": ("baseline", PGD),
    "TRADES, 10 steps": ("baseline", ()),
    "MART, 10 steps": ("baseline", MART),
    "TRADES + BulletTrain, N_R = 2": (None, ()),
    "FAST on PGD-AT": ("fast", PGD),
    "FAST on TRADES": ("fast", ()),
    "FAST on MART": ("fast", MART),
    **{f"multi-step FAST on TRADES, N = {n}": (f"fast-{n}", ()) for n in (2, 3, 4, 5)},
    "YOPO-2-5 on TRADES, λ = 1/6": ("yopo-2-5", ()),
    "YOPO-2-5 on TRADES, λ = 1": ("yopo-2-5", ("beta=1",)),
    "GradAlign, λ = 0.2": ("grad-align", ()),
    "N-FGSM": ("n-fgsm", ()),
    "Free, m = 8": ("free-8", ()),
    "GAT, λ = 10": ("gat", ()),
    "NuAT, λ up to 4.5": ("nuat", ()),
    "FGSM-PGI, λ = 10": ("fgsm-pgi", ()),
}
"""By title: `--method`, and what is set."""


def config_of(title: str, seed: int) -> Config:
    """The digits' recipe as the row has it, without images held out."""
    method, settings = ROWS[title]
    config = recipe("digits").with_settings([*settings, "data.validation=0", "average=0", f"seed={seed}"])
    if method == "baseline":
        return config.baseline()
    return config if method is None else with_method(config, method)


def run(title: str, seed: int) -> dict[str, float]:
    """Clean and PGD-20 accuracy of the last weights, and counted passes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        assert train(config_of(title, seed), path, Place(torch.device("cpu")), keep_going=True).finished
        records = RunFolder(path).records()
        found = {r["attack"]: r["accuracy"] for r in records if r["kind"] == "evaluation" and r["weights"] == "last"}
        work = next(r["work"] for r in records if r["kind"] == "end")
    return {"seed": seed, "clean": found["clean"], "pgd20": found["pgd20"], "passes": work}


def table(record: dict[str, Any]) -> str:
    """Mean and range over seeds."""
    lines = ["| | clean % | PGD-20 % | passes an example |", "|---|---|---|---|"]
    for title in ROWS:
        runs = record["rows"].get(title, [])
        if not runs:
            lines.append(f"| {title} | – | – | – |")
            continue
        cells = []
        for key in ("clean", "pgd20"):
            values = [100 * one[key] for one in runs]
            cells.append(f"{sum(values) / len(values):.1f} ({min(values):.1f}–{max(values):.1f})")
        passes = sum(one["passes"] for one in runs) / len(runs)
        lines.append(f"| {title} | {cells[0]} | {cells[1]} | {passes:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Train, write or check."""
    parser = argparse.ArgumentParser(description="Write docs/baselines.md's table from results/baselines.json")
    parser.add_argument("--run", action="store_true", help="first train what is not on record")
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args()
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {"rows": {}}
    if options.run:
        now = environment(torch.device("cpu"))
        record.setdefault("environment", now | {"command": "python benchmarks/baselines_table.py --run"})
        for title in ROWS:
            runs = record["rows"].setdefault(title, [])
            for seed in SEEDS:
                if seed not in [one["seed"] for one in runs]:
                    runs.append(run(title, seed) | {"commit": now["commit"]})  # others may be older
                    print(title, runs[-1], flush=True)
                    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    text = PAGE.read_text()
    before, rest = text.split(START)
    new = f"{before}{START}\n{table(record)}\n{END}{rest.split(END)[1]}"
    if options.check:
        sys.exit(0 if new == text else "docs/baselines.md is not what results/baselines.json says; run without --check")
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
