"""Train and judge rows of results/plane.csv, several at a time, and add them to the file.

python benchmarks/rows.py run "TRADES 3/3/0 seed=1" "PGD-AT 3/1/1 chance seed=2" --jobs 3 --out runs/rows
python benchmarks/rows.py run "PGD-AT 3/1/0 gaussian" "PGD-AT 3/1/0 gaussian shuffled" "PGD-AT 3/3/3 weight_decay=1e-3"
python benchmarks/rows.py add runs/rows/trades-3-3-0-seed-1

A row is an objective, the steps of boundary / robust / outlier examples, and options: ``chance`` or ``oracle`` in the
place of SVar, the name of another allocation, ``shuffled`` for its control, ``seed=N``, or any setting as
``key=value``. Every row is trained at ε = 8/255 with k = 4 and judged by APGD on 4,000 images with averaged weights;
with ``--autoattack`` by all four attacks on all images, too. One row at a time has the GPU to itself, so that the
minutes of its whole command count. ``run`` needs a GPU; a row that is finished is not run again. ``add`` copies the
survivors into results/steps and writes a line of the file; then run benchmarks/steps_figure.py and plane.py. The folder
of a row that was run again ends with its commit.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plane import COLUMNS, CSV, STEPS
from row_names import CHOSEN_BY, command, folder_name, options_of

from bullettrain.config.methods import left_out, title
from bullettrain.evaluation.results import Store
from bullettrain.run_folder import RunFolder

JUDGE_OPTIONS = ["--precision", "bf16", "--compile", "--batch-size", "2500", "--weights", "averaged"]
APGD = ["--attack", "apgd:eps=8/255", "--images", "4000", *JUDGE_OPTIONS]
AUTOATTACK = ["--attack", "autoattack:eps=8/255", *JUDGE_OPTIONS]
SECONDS = "command_seconds.txt"
"""File of a run that had the GPU to itself: wall-clock seconds of its whole ``train`` command."""


def run_row(row: str, out: Path, deadline: float, *, alone: bool, autoattack: bool) -> str:
    """Train and judge a row unless the deadline has passed; return how that went."""
    words = command(row)
    name = folder_name(" ".join(words))
    folder, log = out / name, out / f"{name}.log"
    if time.monotonic() > deadline:
        return f"{row}: left out"
    resumed = RunFolder(folder).exists
    judges = [["evaluate", str(folder), *how] for how in (APGD, *([AUTOATTACK] if autoattack else []))]
    for part in ([*words, "--out", str(folder), *(["--resume"] if resumed else [])], *judges):
        start = time.monotonic()
        with log.open("a", encoding="utf-8") as file:
            done = subprocess.run([sys.executable, "-m", "bullettrain", *part], stdout=file, stderr=file)
        if done.returncode:
            return f"{row}: {part[0]} failed, see {log}"
        if part[0] == "train" and alone and not resumed:
            (folder / SECONDS).write_text(f"{time.monotonic() - start:.2f}\n", encoding="utf-8")
    return f"{row}: done"


def line_of(folder: Path) -> dict[str, str]:
    """Return the line of the file for a run that was trained and judged."""
    run = RunFolder(folder)
    config, environment, records = run.config(), run.environment(), run.records()
    method, training = config.method, config.training
    judged = {result.name: result for entry in Store(folder).entries for result in entry.results}
    accuracy = {r["attack"]: r["accuracy"] for r in records if r.get("weights") == "averaged"}
    end = next(record for record in reversed(records) if record.get("kind") == "end")
    command = environment["command"].partition(" --out")[0]
    objective, counts = title(method.objective), (method.boundary, method.robust, method.outlier)
    uniform = len(set(counts)) == 1 and method.allocation == "categories"
    without = left_out(vars(method))
    score = "oracle" if method.separation == "oracle" else {"random": "chance"}.get(method.score, method.score)
    steps = "/".join(map(str, counts))
    name = f"{objective}, {counts[0]} step{'s' * (counts[0] != 1)}" if uniform else f"{objective} + BulletTrain {steps}"
    name += f" by {score}" if score in CHOSEN_BY and not uniform else ""
    name += "".join(f", {option}" for option in options_of(command) if option not in CHOSEN_BY)
    values: dict[str, Any] = {"method": name, "objective": objective, "steps": steps, "eps": f"{method.eps:.6f}"}
    values |= {"allocation": ("uniform" if uniform else method.allocation) + without, "score": "" if uniform else score}
    values |= {"k": training.attack_group, "batch_size": training.batch_size, "seed": training.seed}
    values |= {"epochs": training.epochs, "weights": "averaged", "passes": f"{end['work']:.2f}", "command": command}
    values |= {attack: f"{100 * accuracy[attack]:.2f}" for attack in ("clean", "pgd20")}
    for attack in ("apgd", "autoattack"):
        if attack in judged:
            values |= {attack: f"{100 * judged[attack].accuracy:.2f}", f"{attack}_images": judged[attack].examples}
    if (folder / SECONDS).exists():
        values["minutes"] = f"{float((folder / SECONDS).read_text(encoding='utf-8')) / 60:.2f}"
        values["minutes_compile"] = f"{end['capture_seconds'] / 60:.2f}"
    values |= {"device": environment["device"], "commit": environment["commit"][:7]}
    return {column: str(values.get(column, "")) for column in COLUMNS}


def add(folder: Path, file: Path = CSV, survivors: Path = STEPS) -> dict[str, str]:
    """Copy what a run's images survived, and write its line, after those of the same objective."""
    line = line_of(folder)
    there = RunFolder(survivors / folder_name(line["command"]))
    if there.path.exists():
        there = RunFolder(there.path.with_name(f"{there.path.name}-{line['commit']}"))
    if there.path.exists():
        sys.exit(f"{there.path} is on record already")
    there.make()
    if (folder / SECONDS).exists():
        shutil.copy(folder / SECONDS, there.path / SECONDS)
    kept = [r for r in RunFolder(folder).records() if r.get("kind") in ("evaluation", "end")]
    there.write("metrics.jsonl", "".join(json.dumps(record) + "\n" for record in kept).encode())
    judged = RunFolder(folder).read_json("evaluation.json")
    for entry in judged["evaluations"]:
        command = entry["environment"]["command"]
        entry["environment"]["command"] = re.sub(r"(?<= evaluate )\S+", "OUT", command)  # no path of a machine
    there.write_json("evaluation.json", judged)
    text = io.StringIO()
    csv.DictWriter(text, COLUMNS, lineterminator="\n").writerow(line)
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    place = max((i for i, old in enumerate(lines) if f",{line['objective']}," in old), default=len(lines) - 1)
    file.write_text("".join([*lines[: place + 1], text.getvalue(), *lines[place + 1 :]]), encoding="utf-8")
    return line


def main() -> None:
    """Run rows, or add finished ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["run", "add"])
    parser.add_argument("rows", nargs="+", help="rows to run, or folders to add")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time; several share the GPU")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no row after so many minutes")
    parser.add_argument("--autoattack", action="store_true", help="judge by AutoAttack on all images, too")
    parser.add_argument("--out", type=Path, default=Path("runs/rows"), help="folder of the runs")
    options = parser.parse_args()
    if options.do == "add":
        for folder in options.rows:
            line = add(Path(folder))
            print(f"{line['method']}, seed {line['seed']}: {line['clean']} clean, {line['apgd']} under APGD")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    with ThreadPoolExecutor(options.jobs) as pool:
        how = {"alone": options.jobs == 1, "autoattack": options.autoattack}
        for message in pool.map(lambda row: run_row(row, options.out, deadline, **how), options.rows):
            print(message, flush=True)


if __name__ == "__main__":
    main()
