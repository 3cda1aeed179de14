"""Against values computed with the TRADES, MART and AugMix authors' own code, in float64, to 1e-9."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bullettrain as bt
from bullettrain.attacks import pgd

GOLDEN = Path(__file__).parent / "golden"
SETS = [("trades", "k10_b16"), ("trades", "k100_b12"), ("mart", "k10_b16"), ("mart", "k100_b12")]


def load(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: torch.from_numpy(value) for key, value in file.items()}


def network(golden):
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, golden["weight/8.bias"].shape[0]),
    ).double()
    net.load_state_dict({key[7:]: value for key, value in golden.items() if key.startswith("weight/")})
    return net


@pytest.mark.parametrize(("name", "size"), SETS)
def test_the_step_is_the_authors(name, size):
    golden = load(f"{name}_{size}")
    net, x, y = network(golden), golden["x"], golden["y"]
    kind = {"trades": bt.TRADES, "mart": bt.MART}[name]
    objective = kind(beta=float(golden["beta"]), eps=float(golden["eps"]))
    budget = bt.StepBudget.uniform(int(golden["steps"]), step_size=float(golden["alpha"]))
    out = bt.BulletTrain(objective, budget=budget).step(net, x, y, start=x + 0.001 * golden["noise"])
    out.loss.backward()
    assert torch.allclose(out.x_prime, golden["x_adv"], atol=1e-9, rtol=0)
    assert abs(out.loss.item() - float(golden["loss"])) < 1e-9
    for key, parameter in net.named_parameters():
        assert torch.allclose(parameter.grad, golden[f"grad/{key}"], atol=1e-9, rtol=0), key


@pytest.mark.parametrize(("name", "size"), SETS)
def test_the_attack_alone_is_the_authors(name, size):
    golden = load(f"{name}_{size}")
    net, x = network(golden), golden["x"]
    net.eval()
    x_adv = pgd(
        net,
        x,
        golden["y"],
        eps=float(golden["eps"]),
        steps=int(golden["steps"]),
        step_size=float(golden["alpha"]),
        loss="kl" if name == "trades" else "ce",
        target=net(x).softmax(1) if name == "trades" else None,
        start=x + 0.001 * golden["noise"],
    )
    assert torch.allclose(x_adv, golden["x_adv"], atol=1e-9, rtol=0)


@pytest.mark.parametrize("size", ["k10_b16", "k100_b8"])
def test_the_jsd_loss_is_the_authors(size):
    golden = load(f"augmix_jsd_{size}")
    logits = [golden[key].clone().requires_grad_() for key in ("clean", "aug1", "aug2")]
    loss = bt.AugMix().loss(logits[0], torch.stack(logits[1:]), golden["y"])
    loss.backward()
    assert abs(loss.item() - float(golden["loss"])) < 1e-9
    for tensor, key in zip(logits, ("grad_clean", "grad_aug1", "grad_aug2"), strict=True):
        assert torch.allclose(tensor.grad, golden[key], atol=1e-9, rtol=0), key
