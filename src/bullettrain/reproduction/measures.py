"""What rows are evaluated by beside attacks: how well scores order examples, and corruptions made on the spot."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from bullettrain.attacks import frozen
from bullettrain.corruptions.chance import Chance
from bullettrain.corruptions.table import CORRUPTIONS
from bullettrain.data import ImageSet, to_unit
from bullettrain.data.sets import sample
from bullettrain.extras import extra
from bullettrain.mining import Category, is_correct
from bullettrain.oracle import OracleSeparation
from bullettrain.training.method import SCORES, MethodConfig

SPOT = ("gaussian_noise", "gaussian_blur", "contrast")
"""Corruptions that can be made of images of any size."""
MOST_IMAGES, BATCH = 2000, 500
"""Training images on which scores are looked at, and images at once."""


def score_ranks(
    network: nn.Module, images: ImageSet, method: MethodConfig, *, device: torch.device
) -> dict[str, float]:
    """How well the run's score orders training examples by the oracle's classes, of ``network`` in eval mode.

    Returns:
        "rank": Spearman's ρ over all examples; "rank_correct": over correctly classified ones; what is not defined
        (a network without any robust example) is left out.
    """
    if len(images) > MOST_IMAGES:
        images = images.subset(sample(images.labels, MOST_IMAGES))
    generator = torch.Generator(device).manual_seed(0)
    oracle = OracleSeparation(eps=method.eps, norm=method.norm, generator=generator)
    scores, classes = [], []
    torch.manual_seed(0)  # of the random score
    for pixels, labels in zip(torch.split(images.images, BATCH), torch.split(images.labels, BATCH), strict=True):
        x, y = to_unit(pixels.to(device)), labels.to(device)
        with frozen(network), torch.no_grad():
            logits = network(x)
        scores.append(SCORES[method.score](logits, y))
        classes.append(oracle.bind(network, x, y, logits)(scores[-1], torch.zeros(())))
    score, category = torch.cat(scores).double().cpu(), torch.cat(classes).cpu()
    parts = {"rank": category >= 0, "rank_correct": category != Category.OUTLIER}
    found = {name: rank_correlation(score[rows], category[rows]) for name, rows in parts.items()}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's ρ of two (n,) tensors; NaN where one is constant."""
    with extra("a rank correlation"):
        from scipy.stats import spearmanr
    if min(len(a), len(set(a.tolist())), len(set(b.tolist()))) < 2:
        return math.nan
    return float(spearmanr(a.numpy(), b.numpy()).statistic)


def spot_corruptions(network: nn.Module, images: ImageSet, *, device: torch.device) -> dict[str, Any]:
    """Accuracy under noise, blur and contrast at five severities, made here and now of images of any size."""
    pixels, labels = images.images.permute(0, 2, 3, 1).contiguous().to(device), images.labels.to(device)
    accuracy: dict[str, list[float]] = {name: [] for name in SPOT}
    for name, found in accuracy.items():
        for severity, level in enumerate(CORRUPTIONS[name].levels, 1):
            chance = Chance(0, name, severity, first=0, n=len(pixels), device=device)
            worse = CORRUPTIONS[name].apply(pixels, level, chance).permute(0, 3, 1, 2).contiguous()
            with frozen(network), torch.no_grad():
                logits = torch.cat([network(to_unit(part)) for part in torch.split(worse, BATCH)])
            found.append(int(is_correct(logits, labels).sum()) / len(images))
    mean = statistics.fmean(value for values in accuracy.values() for value in values)
    return {"accuracy": mean, "examples": len(images), "over": len(SPOT), "corruptions": accuracy}
