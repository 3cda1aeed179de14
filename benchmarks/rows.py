"""Train and judge rows of results/plane.csv, several at a time, and add them to the file.

python benchmarks/rows.py run "TRADES 3/3/0 seed=1" "PGD-AT 3/1/1 chance seed=2" --jobs 3 --out runs/rows
python benchmarks/rows.py add runs/rows/trades-3-3-0-seed-1

A row is an objective, the steps of boundary / robust / outlier examples, and options: ``chance`` or ``oracle`` in the
place of SVar, ``seed=N``, or any setting as ``key=value``. Every row is trained at ε = 8/255 with k = 4 and judged by
APGD on 4,000 images with averaged weights. ``run`` needs a GPU; a row that is finished is not run again. ``add`` copies
the survivors into results/steps and writes a line of the file; then run benchmarks/steps_figure.py and plane.py.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plane import COLUMNS, CSV, ROOT

from bullettrain.evaluation.results import Store
from bullettrain.formatting import METHODS, left_out
from bullettrain.run_folder import RunFolder

RECIPES = {"PGD-AT": "cifar10-pgd-short", "TRADES": "cifar10-trades-short", "MART": "cifar10-mart-short"}
CHOSEN_BY = {"chance": "score=random", "oracle": "separation=oracle"}
JUDGE = [
    *("--attack", "apgd:eps=8/255", "--images", "4000", "--weights", "averaged"),
    *("--precision", "bf16", "--compile", "--batch-size", "2500"),
]
SURVIVORS = ROOT / "results" / "steps"


def folder_name(objective: str, steps: str, score: str, seed: str) -> str:
    """Return the name of a row's folder: 3-1-1, 3-1-1-chance-seed-1, trades-3-3-3."""
    parts = [] if objective == "PGD-AT" else [objective.lower()]
    parts += [steps.replace("/", "-")]
    parts += [score] if score in CHOSEN_BY else []
    parts += ["seed", seed] if seed != "0" else []
    return "-".join(parts)


def command(row: str) -> tuple[str, list[str]]:
    """Return the folder and the ``train`` command of a row."""
    objective, steps, *options = row.split()
    score = next((option for option in options if option in CHOSEN_BY), "")
    named = dict(option.split("=", 1) for option in options if "=" in option)
    seed = named.pop("seed", "0")
    counts = [f"{key}={n}" for key, n in zip(("boundary", "robust", "outlier"), steps.split("/"), strict=True)]
    settings = ["eps=8/255", *counts, "attack_group=4", "evaluation.search=bf16"]
    settings += [CHOSEN_BY[score]] if score else []
    settings += [f"{key}={value}" for key, value in named.items()]
    name = "-".join([folder_name(objective, steps, score, seed), *named.values()])
    words = ["train", RECIPES[objective], "--compile", "--seed", seed]
    return name, words + [word for setting in settings for word in ("--set", setting)] + ["--keep-going"]


def run_row(row: str, out: Path, deadline: float) -> str:
    """Train and judge a row unless the deadline has passed; return how that went."""
    name, words = command(row)
    folder, log = out / name, out / f"{name}.log"
    if time.monotonic() > deadline:
        return f"{row}: left out"
    again = ["--resume"] if RunFolder(folder).exists else []
    for part in ([*words, "--out", str(folder), *again], ["evaluate", str(folder), *JUDGE]):
        with log.open("a", encoding="utf-8") as file:
            done = subprocess.run([sys.executable, "-m", "bullettrain", *part], stdout=file, stderr=file)
        if done.returncode:
            return f"{row}: {part[0]} failed, see {log}"
    return f"{row}: done"


def line_of(folder: Path) -> dict[str, str]:
    """Return the line of the file for a run that was trained and judged."""
    run = RunFolder(folder)
    config, environment, records = run.config(), run.environment(), run.records()
    method, training = config.method, config.training
    (entry,) = Store(folder).entries
    apgd = next(result for result in entry.results if result.name == "apgd")
    accuracy = {r["attack"]: r["accuracy"] for r in records if r.get("weights") == entry.weights}
    end = next(record for record in reversed(records) if record.get("kind") == "end")
    objective, counts = METHODS[method.objective], (method.boundary, method.robust, method.outlier)
    uniform = len(set(counts)) == 1 and method.allocation == "categories"
    without = left_out(vars(method))
    score = "oracle" if method.separation == "oracle" else {"random": "chance"}.get(method.score, method.score)
    steps = "/".join(map(str, counts))
    name = f"{objective}, {counts[0]} step{'s' * (counts[0] != 1)}" if uniform else f"{objective} + BulletTrain {steps}"
    name += f" by {score}" if score in CHOSEN_BY and not uniform else ""
    name += f", {method.allocation}{' shuffled' * method.shuffled}" if method.allocation != "categories" else ""
    name += without
    values: dict[str, Any] = {"method": name, "objective": objective, "steps": steps, "eps": f"{method.eps:.6f}"}
    values |= {"allocation": ("uniform" if uniform else method.allocation) + without, "score": "" if uniform else score}
    values |= {"k": training.attack_group, "batch_size": training.batch_size, "seed": training.seed}
    values |= {"epochs": training.epochs, "weights": entry.weights, "passes": f"{end['work']:.2f}"}
    values |= {attack: f"{100 * accuracy[attack]:.2f}" for attack in ("clean", "pgd20")}
    values |= {"apgd": f"{100 * apgd.accuracy:.2f}", "apgd_images": apgd.examples}
    values |= {"device": environment["device"], "commit": environment["commit"][:7]}
    values["command"] = environment["command"].partition(" --out")[0]
    return {column: str(values.get(column, "")) for column in COLUMNS}


def add(folder: Path, file: Path = CSV, survivors: Path = SURVIVORS) -> dict[str, str]:
    """Copy what a run's images survived, and write its line, after those of the same objective.

    Folders are named by objective, steps, score and seed; a row that differs in other settings is refused.
    """
    line = line_of(folder)
    there = RunFolder(survivors / folder_name(line["objective"], line["steps"], line["score"], line["seed"]))
    if there.path.exists():
        sys.exit(f"{there.path} is on record already; a row with other settings needs a name of its own")
    there.make()
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
        for said in pool.map(lambda row: run_row(row, options.out, deadline), options.rows):
            print(said, flush=True)


if __name__ == "__main__":
    main()
