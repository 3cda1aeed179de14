"""Accuracy on clean images, and on the worst of several attacks on each image; and which images it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor, nn

from bullettrain.attacks import Norm, bare
from bullettrain.attacks.pgd import RandomStart
from bullettrain.augmix import ViewMaker
from bullettrain.data import ImageSet
from bullettrain.evaluation.rounds import pgd_rounds
from bullettrain.evaluation.survival import Round, Survival, Tick, clean_round, correct, survive

P = ParamSpec("P")


def clean_survival(
    model: nn.Module, data: ImageSet, *, device: torch.device, batch_size: int = 500, tick: Tick | None = None
) -> Survival:
    """What of ``data`` the network, in eval mode and float32, classifies correctly."""
    return survive([clean_round(bare(model))], data, device=device, batch_size=batch_size, tick=tick)


def robust_survival(
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
) -> Survival:
    """What of ``data`` survives every one of ``restarts`` PGD attacks, from uniform starts by default.

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
    return survive([clean_round(net), *attack], data, device=device, batch_size=batch_size, seed=seed, tick=tick)


def view_survival(
    model: nn.Module,
    data: ImageSet,
    *,
    views: ViewMaker,
    device: torch.device,
    batch_size: int = 500,
    seed: int = 0,
    tick: Tick | None = None,
) -> Survival:
    """What of ``data`` is classified correctly as an AugMix view, one of each image.

    What is drawn for a batch depends on ``seed`` and its place alone.
    """
    net = bare(model)

    def survives(x: Tensor, y: Tensor, batch_seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(batch_seed)
        draws = views.draw(len(x), 1, generator=generator, device=device)
        return correct(net, views(x, draws)[0], y)

    return survive([Round("views", survives)], data, device=device, batch_size=batch_size, seed=seed, tick=tick)


def _accuracy(survival: Callable[P, Survival]) -> Callable[P, float]:
    """The same, but only how much it is: the share of all."""

    @functools.wraps(survival)
    def accuracy(*args: P.args, **options: P.kwargs) -> float:
        return survival(*args, **options).share

    return accuracy


clean_accuracy = _accuracy(clean_survival)
robust_accuracy = _accuracy(robust_survival)
view_accuracy = _accuracy(view_survival)
