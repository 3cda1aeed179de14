"""What tests of the group engine share: objectives, budgets, an engine with F_R in the middle, batches to learn."""

import copy

import torch

import bullettrain as bt
from bullettrain import BulletTrain, StepBudget
from conftest import batch

OBJECTIVES = {"pgd": bt.PGDAT, "trades": bt.TRADES, "mart": bt.MART}
BUDGETS = [(4, 2, 0), (4, 0, 0), (4, 2, 1), (3, 3, 3), (3, 2, 2), (0, 0, 0)]


def engine(name, counts):
    train = BulletTrain(OBJECTIVES[name](eps=0.05), budget=StepBudget(*counts))
    train.robust_fraction.load_state_dict({"value": 0.4, "gamma": 0.8, "momentum": 0.9})
    return train


def learnable(net, seeds, m=12):
    batches = []
    for seed in seeds:
        x, y = batch(m, dtype=torch.float64, seed=seed)
        with torch.no_grad():
            y = torch.where(torch.arange(m) % 4 == 3, y, copy.deepcopy(net)(x).argmax(1))
        batches.append((x, y, x + 0.01 * torch.randn(x.shape, dtype=torch.float64)))
    return batches
