"""Train TRADES on scikit-learn's digits in a loop of your own, plain and with BulletTrain, on the CPU.

python examples/own_loop.py
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bullettrain as bt
from bullettrain.attacks import pgd
from bullettrain.models import SmallCNN

EPS = 0.15  # L∞ radius, for pixels in [0, 1]


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return x[train], y[train], x[test], y[test]


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def train_network(budget: bt.StepBudget, epochs: int, seed: int) -> dict[str, float]:
    x, y, x_test, y_test = digits()
    torch.set_num_threads(1)  # a network this small is slower with several threads
    torch.manual_seed(seed)
    model = SmallCNN(channels=1, image_size=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    # BulletTrain: an objective, a budget, and a step for each mini-batch.
    train = bt.BulletTrain(bt.TRADES(beta=6.0, eps=EPS), budget=budget, gamma=0.8)
    passes, seconds = 0.0, time.perf_counter()
    for _ in range(epochs):
        model.train()
        for rows in torch.split(torch.randperm(len(x)), 128):
            out = train.step(model, x[rows], y[rows])
            out.loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            passes += out.work.total
    seconds = time.perf_counter() - seconds

    x_adv = pgd(model, x_test, y_test, eps=EPS, steps=20, step_size=EPS / 10)
    return {
        "clean": 100 * accuracy(model, x_test, y_test),
        "PGD-20": 100 * accuracy(model, x_adv, y_test),
        "seconds": seconds,
        "passes": passes / (epochs * len(x)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="TRADES on digits, plain and with BulletTrain")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    budgets = {"TRADES": bt.StepBudget.uniform(10), "TRADES + BulletTrain": bt.StepBudget(boundary=10, robust=2)}
    print(f"{'':22}{'clean %':>9}{'PGD-20 %':>10}{'seconds':>9}{'passes per example':>19}")
    for name, budget in budgets.items():
        row = train_network(budget, args.epochs, args.seed)
        print(
            f"{name:22}{row['clean']:9.1f}{row['PGD-20']:10.1f}{row['seconds']:9.1f}{row['passes']:19.1f}", flush=True
        )


if __name__ == "__main__":
    main()
