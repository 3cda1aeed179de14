"""The question of the MNIST study from another start: clean updates first, then the full eps at once.

python benchmarks/mnist_start.py [--rows baseline,b0,o0,r0] [--epochs 10] [--data-dir DIR] [--out FILE.json]

The study's recipe lets eps grow, since a network that has learnt nothing does not learn from seven steps of the full
eps. Here it has learnt something first. A row is seven steps for every class but one, which gets none.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bullettrain as bt
from bullettrain.data import ImageSet, load
from bullettrain.evaluation.accuracy import clean_accuracy, robust_accuracy
from bullettrain.mining import Category
from bullettrain.models import SmallCNN
from bullettrain.training.folder import environment
from bullettrain.training.setup import find_place

EPS = 0.3
ROWS = {"baseline": (7, 7, 7), "b0": (0, 7, 7), "o0": (7, 7, 0), "r0": (7, 0, 7)}
"""Steps for boundary, robust and outlier."""


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """An epoch, in random order, in mini-batches of 128."""
    return [(x[rows], y[rows]) for rows in torch.split(torch.randperm(len(y)), 128)]


def judge(network: nn.Module, data: ImageSet, device: torch.device, steps: int, restarts: int = 1) -> dict[str, float]:
    """What is left of test images, clean and under PGD."""
    pgd = robust_accuracy(network, data, eps=EPS, steps=steps, step_size=0.01, restarts=restarts, device=device)
    return {"clean": clean_accuracy(network, data, device=device), "pgd": pgd}


def run(name: str, x: Tensor, y: Tensor, test: ImageSet, args: argparse.Namespace) -> dict[str, Any]:
    """A row: shares of the classes and accuracy after every epoch, and accuracy under more steps at the end."""
    torch.manual_seed(args.seed)
    network = SmallCNN().to(x.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.lr)
    for images, labels in batches(x, y)[: args.updates]:
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    boundary, robust, outlier = ROWS[name]
    engine = bt.BulletTrain(
        bt.PGDAT(eps=EPS),
        budget=bt.StepBudget(boundary, robust, outlier, scale=1.7, ordered=False),
        separation=bt.OracleSeparation(eps=EPS),  # not asked where all get the same
    )
    optimizer, course = torch.optim.Adam(network.parameters(), lr=args.lr), []
    for epoch in range(1, args.epochs + 1):
        counts = torch.zeros(len(Category))
        for images, labels in batches(x, y):
            optimizer.zero_grad()
            out = engine.step(network, images, labels)
            out.loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            counts += out.category.bincount(minlength=len(Category)).cpu()
        shares = {category.name.lower(): counts[category].item() / len(y) for category in Category}
        course.append({"epoch": epoch, **shares, **judge(network, test, x.device, steps=40)})
        print(name, {key: round(value, 3) for key, value in course[-1].items()}, flush=True)
    end = judge(network, test, x.device, steps=100, restarts=args.restarts)
    print(name, end, flush=True)
    return {"row": name, "steps": ROWS[name], **end, "course": course}


def main() -> None:
    """Train the rows, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--updates", type=int, default=300, help="clean ones")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--images", type=int, default=10_000, help="test images to judge by")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = find_place(args.device).device
    train, test = (load("mnist", split=split, root=args.data_dir) for split in ("train", "test"))
    x, y = (train.images.float() / 255).to(device), train.labels.to(device)
    test = ImageSet(test.images[: args.images], test.labels[: args.images], test.classes)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "data_dir", "device")}
    rows = [run(name, x, y, test, args) for name in args.rows.split(",")]
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        here = {key: value for key, value in environment(device).items() if key != "command"}
        result = {"environment": here, "settings": settings, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
