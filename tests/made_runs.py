"""Folders of runs that were never run, for what is said of them: a plausible log, a config, example images."""

import json
import math

import numpy as np
import yaml
from safetensors.numpy import save_file

CLASSES = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def make_run(folder, *, epochs=30, plain=False, end=True, samples=True, recipe="trades-short", per_epoch=13, seed=0):
    """A run's folder with plausible numbers: TRADES on CIFAR-10, with or without mining."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    budget = {"boundary": 10, "robust": 10 if plain else 2, "outlier": 10 if plain else 0}
    write_config(folder, recipe, epochs, budget)
    records = []
    for index in range(1, epochs * per_epoch + 1):
        t = index / (epochs * per_epoch)
        records.append({"kind": "step", "step": 30 * index, **training(t, rng, plain), "epoch": index / per_epoch})
        if index % per_epoch == 0:
            epoch = index // per_epoch
            timing = {"seconds": (7.05 if plain else 5.27) + 0.1 * rng.random(), "examples_per_second": 9487.0}
            measured = {k: v for k, v in training(t, rng, plain).items() if not k.startswith("svar")}
            checked = {"validation_clean": 0.81 * (1 - math.exp(-4 * t)), "validation_robust": 0.51 * t**0.4}
            probe = {"probe_robust": 0.53 * t**0.4 + 0.03 * rng.standard_normal()}
            records.append(
                {"kind": "epoch", "step": 30 * index, **measured, **timing, **checked, **probe, "epoch": epoch}
            )
            records.append({"kind": "batch", "step": 30 * index, "epoch": epoch, **batch(t, rng, budget)})
    if end:
        for weights, clean, pgd in (("last", 0.8146, 0.5121), ("best", 0.8102, 0.5148), ("averaged", 0.8171, 0.5163)):
            result = {"kind": "evaluation", "weights": weights, "examples": 10000, "epoch": epochs}
            records += [
                {**result, "attack": "clean", "accuracy": clean},
                {**result, "attack": "pgd20", "accuracy": pgd},
            ]
        totals = {
            "outlier": 0.24,
            "boundary": 0.33,
            "robust": 0.43,
            "work": 27.0 if plain else 14.5,
            "plain_work": 27.0,
        }
        ratios = {"theoretical_speedup": 2.04, "work_speedup": 1.79, "examples": 50000 * epochs}
        seconds = {"seconds": (212.0 if plain else 158.4) * epochs / 30, "epochs": epochs}
        records.append({"kind": "end", "reason": "finished", **seconds, **totals, **ratios})
    write_log(folder, records)
    if samples:
        write_samples(folder, rng)
    return folder


def write_config(folder, recipe, epochs, budget):
    environment = {"bullettrain": "0.1.0", "torch": "2.9.1", "python": "3.11.2", "numpy": "2.4.0", "commit": None}
    config = {
        "recipe": recipe,
        "data": {
            "name": "cifar10",
            "augment": ["crop 4", "flip"],
            "train_examples": 49000,
            "validation_examples": 1000,
        },
        "network": {"name": "preact-resnet18", "classes": 10},
        "method": {"objective": "trades", "eps": 8 / 255, "beta": 6.0, **budget, "gamma": 0.8, "norm": "linf"},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0005},
        "schedule": {"name": "triangle", "peak": 0.3},
        "training": {"epochs": epochs, "batch_size": 128, "seed": 0, "amp": True},
        "environment": {**environment, "device": "NVIDIA H200", "command": f"bullettrain train {recipe} --seed 0"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def training(t, rng, plain):
    """What a step logs at the fraction t of training."""
    outlier = 0.12 + 0.68 * math.exp(-5 * t) + 0.012 * rng.standard_normal()
    robust = (1 - outlier) * (0.18 + 0.46 * t**0.5) + 0.01 * rng.standard_normal()
    accuracy = 1 - outlier
    svar = {
        "svar_outlier": -0.012 - 0.02 * t**0.5,
        "svar_boundary": 0.006 + 0.022 * t,
        "svar_robust": 0.016 + 0.055 * t**0.6,
    }
    noisy = {name: value + 0.002 * rng.standard_normal() for name, value in svar.items()}
    shares = {"outlier": outlier, "boundary": 1 - outlier - robust, "robust": robust, "robust_fraction": robust}
    loss = 1.15 + 1.1 * math.exp(-6 * t) + 0.02 * rng.standard_normal()
    attacked = (0.22 + 0.34 * t**0.5) * (1 if plain else 1.05) + 0.01 * rng.standard_normal()
    lr = 0.1 * min(t / 0.3, (1 - t) / 0.7)
    accuracies = {"clean_accuracy": accuracy, "robust_accuracy": attacked}
    return {"loss": loss, "lr": lr, **shares, **noisy, **accuracies, "work": 27.0 if plain else 12 + 4 * t}


def batch(t, rng, budget):
    probability = rng.beta(1.6, 1.1, 128)
    wrong = rng.random(128) < 0.12 + 0.6 * math.exp(-5 * t)
    svar = np.where(wrong, -0.07 * rng.beta(1.2, 3, 128), 0.09 * probability**2)
    category = np.where(svar < 0, 0, np.where(svar < np.quantile(svar, 0.55), 1, 2))
    steps = np.array([budget["outlier"], budget["boundary"], budget["robust"]])[category]
    return {"svar": svar.tolist(), "steps": steps.tolist(), "category": category.tolist()}


def write_log(folder, records):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def read_log(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write_samples(folder, rng, n=24, channels=3, size=32):
    grid = np.linspace(0, 1, size)
    phase = rng.random((n, channels, 3)) * 6
    waves = np.sin(4 * grid[:, None] + phase[..., :1, None]) + np.sin(5 * grid[None, :] + phase[..., 1:2, None])
    blob = np.exp(-8 * ((grid[:, None] - 0.5) ** 2 + (grid[None, :] - 0.5) ** 2)) * np.sin(phase[..., 2:3, None])
    clean = np.clip(128 + 45 * waves + 90 * blob, 0, 255).astype(np.uint8)
    category = np.repeat(np.arange(3), n // 3)
    noise = np.sign(np.cumsum(rng.standard_normal(clean.shape), axis=-1)) * rng.choice([4, 8], clean.shape)
    noise[category == 0] = 0
    label = rng.integers(0, 10, n)
    other = (label + rng.integers(1, 10, n)) % 10
    tensors = {
        "clean": clean,
        "adversarial": np.clip(clean + noise, 0, 255).astype(np.uint8),
        "category": category,
        "label": label,
        "clean_prediction": np.where(category == 0, other, label),
        "adversarial_prediction": np.where(category == 2, label, other),
    }
    save_file(tensors, folder / "samples.safetensors", metadata={"classes": json.dumps(CLASSES)})


def make_comparison(folder, errors=None):
    make_run(folder / "bullettrain")
    make_run(folder / "baseline", plain=True, seed=1)
    rows = [
        {
            "name": "baseline",
            "weights": "last",
            "clean": 0.7931,
            "pgd20": 0.5184,
            "seconds": 212.0,
            "work": 27.0,
            "outlier": None,
        },
        {
            "name": "bullettrain",
            "weights": "last",
            "clean": 0.8146,
            "pgd20": 0.5121,
            "seconds": 158.4,
            "work": 14.5,
            "outlier": 0.24,
        },
    ]
    speedup = {"theoretical": 2.04, "work": 1.79, "wall_clock": 1.34}
    (folder / "comparison.json").write_text(json.dumps({"rows": rows, "speedup": speedup, "errors": errors or {}}))
    return folder
