"""Write the table of docs/speed.md from the recorded figures in results/bench.

python benchmarks/speed_table.py [--check]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- speed: from results/bench -->", "<!-- /speed -->"
NETWORKS = {"preact-resnet-18": "PreActResNet-18", "wrn-34-10": "WRN-34-10", "small-cnn": "small CNN"}
NETWORKS |= {"wrn-40-2": "WRN-40-2"}
DATA = {"digits": "digits", "mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
OBJECTIVES = {"trades": "TRADES", "mart": "MART", "pgd-at": "PGD-AT", "augmix": "AugMix"}
SELECTIONS = {"eval": ", selected in eval mode", "last": ", by last logits"}
ENGINES = {"eager": "eager", "graphs": "CUDA graphs", "compile": "compiled"}


def table() -> str:
    """The table as Markdown, one line a recorded comparison."""
    lines = [
        "| network, objective | k | baseline, s/epoch | BulletTrain, s/epoch | wall-clock | work | wall-clock ÷ work "
        "| measured on |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    files = sorted((ROOT / "results" / "bench").glob("*.json"))
    for file in sorted(files, key=lambda file: file.name.startswith("cpu")):  # GPUs first
        result = json.loads(file.read_text())
        rows = {(row["engine"], row["method"]): row for row in result["rows"]}
        lines += [
            line(result, engine, rows[engine, "baseline"], rows[engine, "bullettrain"], file.name)
            for engine in ENGINES
            if {(engine, "baseline"), (engine, "bullettrain")} <= set(rows)
        ]
    return "\n".join(lines)


def line(result: dict[str, Any], engine: str, baseline: dict[str, Any], mined: dict[str, Any], name: str) -> str:
    """One comparison."""
    config = result["config"]
    batch = config["training"]["batch_size"]
    objective = OBJECTIVES[config["method"]["objective"]] + SELECTIONS.get(config["method"].get("selection"), "")
    objective += f", views for {100 * mined['boundary']:.0f} %" if objective.startswith("AugMix") else ""
    objective += ", images as views" if config["data"].get("views") else ""
    network = NETWORKS.get(config["network"]["name"], config["network"]["name"])
    data = DATA.get(config["data"]["name"], config["data"]["name"])
    cells = [
        f"{network} on {data}, {objective}" + (f", batch {batch}" if batch > 128 else ""),
        str(config["training"]["attack_group"] if engine != "eager" else 1),
        f"{baseline['epoch_seconds']:.2f}",
        f"{mined['epoch_seconds']:.2f}",
        f"{mined['wall_clock_speedup']:.2f}×",
        f"{mined['work_speedup']:.2f}×",
        f"{mined['wall_clock_speedup'] / mined['work_speedup']:.2f}",
        f"[{device(result['environment'])}, {ENGINES[engine]}](../results/bench/{name}), {commit(result)}",
    ]
    return "| " + " | ".join(cells) + " |"


def commit(result: dict[str, Any]) -> str:
    """Of the engine that was timed."""
    return str(result["environment"]["commit"])[:7]


def device(environment: dict[str, Any]) -> str:
    """What it ran on; on a CPU with how many threads."""
    name, threads = str(environment["device"]), environment.get("threads")
    name = name.removeprefix("NVIDIA ")
    return name.replace("2 cores", "1 core") if threads == 1 and name.startswith("2 cores") else name


def main() -> None:
    """Rewrite the page, or check that it is up to date."""
    parser = argparse.ArgumentParser(description="Write the table of docs/speed.md from results/bench")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    check = parser.parse_args().check
    page = ROOT / "docs" / "speed.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(START)
    after = rest.split(END)[1]
    new = f"{before}{START}\n{table()}\n{END}{after}"
    if check:
        sys.exit(
            0 if new == text else "docs/speed.md: the table is not what results/bench says; run this without --check"
        )
    page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
