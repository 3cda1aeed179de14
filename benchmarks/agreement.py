"""Do other people's tools give the same robust accuracy? PGD of torchattacks and foolbox beside ours.

    python benchmarks/agreement.py runs/mnist --data mnist --out results/agreement/mnist

The same network, images, ε, step and steps: once from the images themselves, where the tools should agree image by
image, and once from random starts, of which each tool draws its own (torchattacks begins nearer to the image in L2).
Writes .json and .md. The two packages are not among the extras, because torchattacks asks for an old `requests`:
`pip install --no-deps torchattacks`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import bullettrain as bt
from bullettrain.attacks import frozen
from bullettrain.data import ImageSet, load, to_unit
from bullettrain.evaluation.accuracy import clean_round, correct, pgd_rounds, survive
from bullettrain.evaluation.specs import PGD, NormName
from bullettrain.run_folder import environment

Attack = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""``attack(model, x (m, C, H, W), y (m,)) -> x' (m, C, H, W)``."""


def with_torchattacks(norm: str, eps: float, steps: int, step: float, random: bool) -> Attack:
    """PGD of torchattacks."""
    import torchattacks

    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if norm == "linf":
            attacker = torchattacks.PGD(model, eps=eps, alpha=step, steps=steps, random_start=random)
        else:
            attacker = torchattacks.PGDL2(model, eps=eps, alpha=step, steps=steps, random_start=random)
        found: Tensor = attacker(x, y)
        return found

    return attack


def with_foolbox(norm: str, eps: float, steps: int, step: float, random: bool) -> Attack:
    """PGD of foolbox."""
    import foolbox

    kinds = {"linf": foolbox.attacks.LinfPGD, "l2": foolbox.attacks.L2PGD}
    attacker = kinds[norm](abs_stepsize=step, steps=steps, random_start=random)

    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device=x.device)
        _, clipped, _ = attacker(wrapped, x, y, epsilons=eps)
        found: Tensor = clipped
        return found

    return attack


PEERS: dict[str, Callable[[str, float, int, float, bool], Attack]] = {
    "torchattacks": with_torchattacks,
    "foolbox": with_foolbox,
}


def peer_accuracy(model: nn.Module, data: ImageSet, attack: Attack, batch_size: int = 500) -> float:
    """Share of ``data`` that is classified correctly as it is and after ``attack``, as ours counts it."""
    model.eval()
    alive = 0
    for at in range(0, len(data), batch_size):
        x, y = to_unit(data.images[at : at + batch_size]), data.labels[at : at + batch_size]
        right = correct(model, x, y)
        with frozen(model):
            x_adv = attack(model, x, y).detach()
        alive += int((right & correct(model, x_adv, y)).sum())
    return alive / len(data)


def compare(
    model: nn.Module,
    data: ImageSet,
    *,
    norm: str,
    eps: float,
    steps: int,
    step: float,
    random: bool,
    peers: Sequence[str],
    seed: int = 0,
) -> dict[str, Any]:
    """Robust accuracy by each tool, and seconds; ``random``: from random starts, else from the images."""
    accuracy, seconds = {}, {}
    for name in ("bullettrain", *peers):
        torch.manual_seed(seed)
        began = time.monotonic()
        if name == "bullettrain":
            attack = PGD(steps, 1, step, "ce", cast(NormName, norm), eps)
            rounds = [clean_round(model), *pgd_rounds(model, attack, random_start="uniform" if random else None)]
            accuracy[name] = survive(rounds, data, device=torch.device("cpu"), seed=seed).share
        else:
            accuracy[name] = peer_accuracy(model, data, PEERS[name](norm, eps, steps, step, random))
        seconds[name] = round(time.monotonic() - began, 1)
    settings = {"norm": norm, "eps": eps, "steps": steps, "step": step, "random_start": random}
    return {**settings, "examples": len(data), "accuracy": accuracy, "seconds": seconds}


def markdown(result: dict[str, Any]) -> str:
    """The comparison as a table."""
    names = list(result["rows"][0]["accuracy"])
    lines = [
        "| " + " | ".join(["attack", "examples", *(f"{name} {result['versions'][name]}" for name in names)]) + " |",
        "|" + "---|" * (len(names) + 2),
    ]
    for row in result["rows"]:
        norm, start = "L∞" if row["norm"] == "linf" else "L2", "random" if row["random_start"] else "no random"
        attack = f"PGD-{row['steps']}, {norm} ε = {row['eps']:g}, step {row['step']:g}, {start} start"
        cells = [attack, str(row["examples"]), *(f"{100 * row['accuracy'][name]:.2f} %" for name in names)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Compare, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--size", type=int, default=0, help="test images; 0: all")
    parser.add_argument("--linf", type=float, default=0.3, help="ε in L∞")
    parser.add_argument("--l2", type=float, default=2.0, help="ε in L2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    data = load(given.data, split="test", root=given.data_dir)
    if given.size:
        data = data.subset(torch.arange(given.size))
    model = bt.load(given.run)
    rows = []
    for (norm, eps), random in product((("linf", given.linf), ("l2", given.l2)), (False, True)):
        settings: dict[str, Any] = {"norm": norm, "eps": eps, "steps": given.steps, "step": eps / 10, "random": random}
        rows.append(compare(model, data, **settings, peers=list(PEERS), seed=given.seed))
        print(rows[-1], flush=True)
    result = {
        "rows": rows,
        "versions": {name: importlib.metadata.version(name) for name in ("bullettrain", *PEERS)},
        "environment": environment(torch.device("cpu"))
        | {"command": shlex.join(["python", "benchmarks/agreement.py", *sys.argv[1:]])},
    }
    print(markdown(result))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
        given.out.with_suffix(".md").write_text(markdown(result) + "\n")


if __name__ == "__main__":
    main()
