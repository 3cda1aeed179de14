"""What rows are judged by beside attacks: how well scores order examples, and corruptions made on the spot."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from bullettrain.attacks import frozen
from bullettrain.corruptions.chance import Chance
from bullettrain.corruptions.table import CORRUPTIONS, SEVERITIES
from bullettrain.data import ImageSet, to_unit
from bullettrain.data.sets import sample
from bullettrain.mining import Category, is_correct
from bullettrain.oracle import OracleSeparation
from bullettrain.training.method import SCORES, MethodConfig

SPOT = ("gaussian_noise", "gaussian_blur", "contrast")
"""Corruptions that can be made of images of any size."""
MOST = 2000
"""Training images on which scores are looked at."""


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's ρ of two (n,) tensors; equal values share their mean rank. NaN where one is constant."""
    ranks = torch.stack([_ranks(a), _ranks(b)])
    if len(a) < 2 or (ranks.std(dim=1, correction=0) == 0).any():
        return math.nan
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Tensor) -> Tensor:
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks: Tensor = (ends - (counts - 1) / 2)[inverse]
    return ranks


def score_ranks(
    network: nn.Module, images: ImageSet, method: MethodConfig, *, device: torch.device, batch_size: int = 500
) -> dict[str, float]:
    """How well the run's score orders training examples by the oracle's classes, of ``network`` in eval mode.

    Returns:
        "rank": Spearman's ρ over all examples; "rank_correct": over correctly classified ones; what is not defined
        (a network without any robust example) is left out.
    """
    if len(images) > MOST:
        images = images.subset(sample(images.labels, MOST))
    generator = torch.Generator(device).manual_seed(0)
    oracle = OracleSeparation(eps=method.eps, norm=method.norm, generator=generator)
    scores, classes = [], []
    torch.manual_seed(0)  # of the random score
    for at in range(0, len(images), batch_size):
        x = to_unit(images.images[at : at + batch_size].to(device))
        y = images.labels[at : at + batch_size].to(device)
        with frozen(network), torch.no_grad():
            logits = network(x)
        scores.append(SCORES[method.score](logits, y))
        classes.append(oracle.bind(network, x, y, logits)(scores[-1], torch.zeros(())))
    score, category = torch.cat(scores).double().cpu(), torch.cat(classes).cpu()
    correct = category != Category.OUTLIER
    found = {
        "rank": rank_correlation(score, category.double()),
        "rank_correct": rank_correlation(score[correct], category[correct].double()),
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def spot_corruptions(
    network: nn.Module, images: ImageSet, *, device: torch.device, batch_size: int = 500
) -> dict[str, Any]:
    """Accuracy under noise, blur and contrast at five severities, made here and now of images of any size."""
    hits = {name: [0] * SEVERITIES for name in SPOT}
    for at in range(0, len(images), batch_size):
        pixels = images.images[at : at + batch_size].to(device).permute(0, 2, 3, 1).contiguous()
        y = images.labels[at : at + batch_size].to(device)
        for name in SPOT:
            for place, level in enumerate(CORRUPTIONS[name].levels):
                chance = Chance(0, name, place + 1, first=at, n=len(pixels), device=device)
                worse = CORRUPTIONS[name].apply(pixels, level, chance)
                with frozen(network), torch.no_grad():
                    logits = network(to_unit(worse.permute(0, 3, 1, 2).contiguous()))
                hits[name][place] += int(is_correct(logits, y).sum())
    shares = {name: [count / len(images) for count in counts] for name, counts in hits.items()}
    mean = statistics.fmean(share for row in shares.values() for share in row)
    return {"accuracy": mean, "examples": len(images), "over": len(SPOT), "corruptions": shares}
