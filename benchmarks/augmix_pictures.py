"""Draw AugMix's trainings of 100 epochs from their records: what BulletTrain gains and loses by corruption, and when.

python benchmarks/augmix_pictures.py [--out results/augmix]
"""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bullettrain.corruptions.table import AVERAGED
from bullettrain.evaluation.results import Store
from bullettrain.reporting.plotting import COLOURS, panels, printed
from bullettrain.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent / "results" / "augmix"
LOOKS = (("s", "soft"), ("o", "accent"), ("^", "boundary"), ("D", "robust"))
PICTURES = {
    "cifar10-batch-128": {
        "AugMix": "cifar10-long/augmix",
        "+ BulletTrain": "cifar10-long/bullettrain",
        "+ BulletTrain, images as views": "cifar10-long/bullettrain-views",
    },
    "cifar10-batch-512": {
        "AugMix": "cifar10-batch-512/augmix",
        "+ BulletTrain, images as views, last logits": "cifar10-batch-512/bullettrain",
        "the same again": "cifar10-batch-512/bullettrain-again",
        "and again": "cifar10-batch-512/bullettrain-alone",
    },
    "cifar100-batch-500": {
        "AugMix": "cifar100-batch-500/augmix",
        "+ BulletTrain, half of the images as views, γ = 0.5": "cifar100-batch-500/bullettrain",
        "γ = 0.4": "cifar100-batch-500/bullettrain-gamma-0.4",
        "γ = 0.3": "cifar100-batch-500/bullettrain-gamma-0.3",
    },
    "cifar100-batch-512": {
        "AugMix": "cifar100-batch-512/augmix",
        "+ BulletTrain, all images as views, own logits": "cifar100-batch-512/bullettrain-own-logits",
        "the same, last logits": "cifar100-batch-512/bullettrain",
    },
}
"""The first of each is what the others are compared with."""


def main() -> None:
    """One picture for each data set and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT)
    out = parser.parse_args().out
    for name, runs in PICTURES.items():
        with printed():
            drawn(runs).savefig(out / f"{name}.png", dpi=120, facecolor="white", metadata={"Software": None})
        print(out / f"{name}.png")


def drawn(runs: dict[str, str]) -> Figure:
    """Differences by corruption, share of examples with views, accuracy while training."""
    figure, (left, middle, right) = panels(columns=3, width=3.0, height=1.3)
    lines: dict[str, Any] = {}
    found = {title: by_corruption(ROOT / folder) for title, folder in runs.items()}
    first = next(iter(found.values()))
    names = sorted(AVERAGED, key=lambda name: first[name])
    for (title, folder), (marker, colour) in zip(runs.items(), LOOKS, strict=False):
        course = [record for record in RunFolder(ROOT / folder).records() if record["kind"] == "epoch"]
        at = [epoch["epoch"] for epoch in course]
        look: dict[str, Any] = {"color": COLOURS[colour], "linewidth": 1.4, "marker": marker, "markersize": 5}
        look["markevery"] = (9, 20)
        (lines[title],) = right.plot(at, [100 * epoch["robust_accuracy"] for epoch in course], **look)
        middle.plot(at, [100 * epoch["boundary"] for epoch in course], **look)
        apart = [found[title][name] - first[name] for name in names]
        left.plot(apart, range(len(names)), **{**look, "linestyle": "none", "markevery": None})
    left.axvline(0, color=COLOURS["soft"], linewidth=0.9)
    left.set_yticks(range(len(names)), [f"{name.replace('_', ' ')}  {first[name]:.0f} %" for name in names])
    left.set(xlabel="points more than AugMix, whose accuracy is at the left")
    left.grid(visible=False, axis="y")
    left.grid(visible=True, axis="x")
    middle.set(xlabel="epoch", ylabel="examples with (further) views, %", ylim=(0, 103))
    right.set(xlabel="epoch", ylabel="accuracy on what is trained on, %")
    place: dict[str, Any] = {"loc": "outside upper center", "ncols": len(lines)}
    figure.legend(list(lines.values()), list(lines), frameon=False, fontsize=9.5, handlelength=3, **place)
    return figure


def by_corruption(run: Path) -> dict[str, float]:
    """Percent, the mean of five severities, of a run's last weights."""
    judged = chain.from_iterable(entry.results for entry in Store(run).entries if entry.weights == "last")
    accuracy = next(result.corruptions["accuracy"] for result in judged if result.corruptions)
    return {name: 100 * float(np.mean(accuracy[name])) for name in AVERAGED}


if __name__ == "__main__":
    main()
