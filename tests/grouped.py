"""What tests of fast steps share: objectives, budgets, an engine with F_R in the middle, batches to learn."""

import copy

import torch

import bullettrain as bt
from bullettrain import BulletTrain, Captured, StepBudget
from bullettrain.engine.cuda_graphs import optimizer_tensors
from bullettrain.engine.phases import EAGER, Batch
from conftest import batch
from emulated import EmulatedRunner

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


class Trained(Captured):
    """Captured steps with an optimiser of their own; ``pair``: whether batches share a forward, compiled or not."""

    def __init__(self, train, net, optimizer=None, *, pair=False, size_multiple=1, clip=None, **settings):
        settings.setdefault("attack_group", 3)
        settings.setdefault("on_message", print)
        super().__init__(train, net, pair=pair, size_multiple=size_multiple, **settings)
        self.optimizer, self.clip = optimizer, clip
        if optimizer is not None:
            self.more_state = lambda: optimizer_tensors(optimizer)

    def _pairs(self):
        return self.pair

    @property
    def paired(self):
        return self._phases.forwards.paired

    def move_weights(self):
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()

    def train_on(self, batches):
        """Outputs of mini-batches, each followed by an update."""
        outs = []
        for out in self.updates([Batch(*one) for one in batches]):
            outs.append(out.clone())
            if self.optimizer is not None:
                self.runner(self.move_weights)
        return outs


class Fast(Trained):
    """Fast forwards and packed schedules without a GPU: at once, or with graphs that are emulated."""

    def __init__(self, *args, emulated=False, **settings):
        super().__init__(*args, **settings)
        self.emulated = emulated

    def _why_not_captured(self, x):
        return None

    def _make_runner(self):
        return EmulatedRunner(self._state, self._given_up) if self.emulated else EAGER
