"""Accuracy on clean images, and on the worst of several attacks on each image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bullettrain.attacks import Norm, bare
from bullettrain.attacks.pgd import RandomStart
from bullettrain.augmix import ViewMaker
from bullettrain.data import ImageSet
from bullettrain.evaluation.rounds import pgd_rounds
from bullettrain.evaluation.survival import Round, Tick, clean_round, correct, survive


def clean_accuracy(
    model: nn.Module, data: ImageSet, *, device: torch.device, batch_size: int = 500, tick: Tick | None = None
) -> float:
    """Share of ``data`` that the network, in eval mode and float32, classifies correctly."""
    return survive([clean_round(bare(model))], data, device=device, batch_size=batch_size, tick=tick).share


def robust_accuracy(
    model: nn.Module,
    data: ImageSet,
    *,
    eps: float,
    steps: int,
    step_size: float,
    restarts: int = 1,
    norm: str | Norm = "linf",
    loss: str = "ce",
    random_start: RandomStart | None = "uniform",
    device: torch.device,
    batch_size: int = 500,
    seed: int = 0,
    tick: Tick | None = None,
) -> float:
    """Share of ``data`` that survives every one of ``restarts`` PGD attacks, from uniform starts by default.

    Images that are lost already, clean or in an earlier restart, are not attacked again. The noise of a batch
    depends on ``seed``, the restart and the batch's place alone.
    """
    net = bare(model)
    attack = pgd_rounds(
        net,
        eps=eps,
        steps=steps,
        step_size=step_size,
        restarts=restarts,
        norm=norm,
        loss=loss,
        random_start=random_start,
        device=device,
    )
    return survive([clean_round(net), *attack], data, device=device, batch_size=batch_size, seed=seed, tick=tick).share


def view_accuracy(
    model: nn.Module,
    data: ImageSet,
    *,
    views: ViewMaker,
    device: torch.device,
    batch_size: int = 500,
    seed: int = 0,
    tick: Tick | None = None,
) -> float:
    """Share of ``data`` that is classified correctly as an AugMix view, one of each image.

    What is drawn for a batch depends on ``seed`` and its place alone.
    """
    net = bare(model)

    def withstood(x: Tensor, y: Tensor, batch_seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(batch_seed)
        draws = views.draw(len(x), 1, generator=generator, device=device)
        return correct(net, views(x, draws)[0], y)

    return survive([Round("views", withstood)], data, device=device, batch_size=batch_size, seed=seed, tick=tick).share
