"""Rank correlation between the scores of examples and their categories by the oracle."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bullettrain.attacks import frozen
from bullettrain.config.method import SCORES, MethodConfig
from bullettrain.data import ImageSet, to_unit
from bullettrain.data.sets import sample
from bullettrain.extras import extra
from bullettrain.mining import Category
from bullettrain.oracle import OracleSeparation

MAX_IMAGES, BATCH = 2000, 500
"""Number of training images that are scored, and the batch size."""


def score_ranks(
    network: nn.Module, images: ImageSet, method: MethodConfig, *, device: torch.device
) -> dict[str, float]:
    """Return how well the run's score orders training examples by the oracle's categories.

    Returns:
        "rank": Spearman's ρ over all examples; "rank_correct": over correctly classified ones. A correlation that is
        not defined (e.g. without any robust example) is left out.
    """
    if len(images) > MAX_IMAGES:
        images = images.subset(sample(images.labels, MAX_IMAGES))
    generator = torch.Generator(device).manual_seed(0)
    oracle = OracleSeparation(eps=method.eps, norm=method.norm, generator=generator)
    scores, categories = [], []
    torch.manual_seed(0)  # for the random score
    for pixels, labels in zip(torch.split(images.images, BATCH), torch.split(images.labels, BATCH), strict=True):
        x, y = to_unit(pixels.to(device)), labels.to(device)
        with frozen(network), torch.no_grad():
            logits = network(x)
        scores.append(SCORES[method.score](logits, y))
        categories.append(oracle.bind(network, x, y, logits)(scores[-1], torch.zeros(())))
    score, category = torch.cat(scores).double().cpu(), torch.cat(categories).cpu()
    parts = {"rank": category >= 0, "rank_correct": category != Category.OUTLIER}
    ranks = {name: rank_correlation(score[rows], category[rows]) for name, rows in parts.items()}
    return {name: value for name, value in ranks.items() if math.isfinite(value)}


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's ρ of two (n,) tensors; NaN if one is constant."""
    with extra("a rank correlation"):
        from scipy.stats import spearmanr
    if min(len(a), len(set(a.tolist())), len(set(b.tolist()))) < 2:
        return math.nan
    return float(spearmanr(a.numpy(), b.numpy()).statistic)
