"""Accuracy on clean images, under PGD, and on AugMix views: the rounds that they are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bullettrain.attacks import bare, frozen, pgd
from bullettrain.attacks.pgd import RandomStart
from bullettrain.augmix import ViewMaker
from bullettrain.data import ImageSet
from bullettrain.evaluation.evaluated_model import correct
from bullettrain.evaluation.specs import PGD
from bullettrain.evaluation.survival import Round, survive
from bullettrain.precision import at_least_float32


def clean_round(model: nn.Module) -> Round:
    """The images as they are."""
    net = bare(model)
    return Round("clean", lambda x, y, seed: correct(net, x, y))


def pgd_rounds(model: nn.Module, attack: PGD, *, random_start: RandomStart | None = "uniform") -> list[Round]:
    """One round a restart; an image survives where the last iterate is classified correctly."""
    net = bare(model)

    def survives(x: Tensor, y: Tensor, seed: int) -> Tensor:
        target = None
        if attack.loss == "kl":
            with frozen(net), torch.no_grad():
                target = at_least_float32(net(x)).softmax(dim=1)
        x_adv = pgd(
            net,
            x,
            y,
            eps=attack.eps,
            steps=attack.steps,
            step_size=attack.step,
            norm=attack.norm,
            loss=attack.loss,
            target=target,
            random_start=random_start,
            generator=torch.Generator(x.device).manual_seed(seed),
            check=False,  # the images come from bytes
        )
        return correct(net, x_adv, y)

    names = [f"restart {number + 1}" for number in range(attack.restarts)] if attack.restarts > 1 else ["pgd"]
    return [Round(name, survives) for name in names]


def view_round(model: nn.Module, views: ViewMaker) -> Round:
    """One AugMix view of each image."""
    net = bare(model)

    def survives(x: Tensor, y: Tensor, seed: int) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(seed)
        return correct(net, views(x, views.draw(len(x), 1, generator=generator, device=x.device))[0], y)

    return Round("views", survives)


def clean_accuracy(model: nn.Module, data: ImageSet, *, device: torch.device, batch_size: int = 500) -> float:
    """Share of ``data`` that the network, in eval mode and float32, classifies correctly."""
    return survive([clean_round(model)], data, device=device, batch_size=batch_size).share


def robust_accuracy(
    model: nn.Module, data: ImageSet, attack: PGD, *, device: torch.device, batch_size: int = 500, seed: int = 0
) -> float:
    """Share of ``data`` that survives every restart of ``attack``.

    Images that are lost already, clean or in an earlier restart, are not attacked again. The noise of a batch
    depends on ``seed``, the restart and the batch's place alone.
    """
    rounds = [clean_round(model), *pgd_rounds(model, attack)]
    return survive(rounds, data, device=device, batch_size=batch_size, seed=seed).share


def view_accuracy(
    model: nn.Module, data: ImageSet, views: ViewMaker, *, device: torch.device, batch_size: int = 500, seed: int = 0
) -> float:
    """Share of ``data`` that is classified correctly as an AugMix view; what is drawn depends on ``seed`` alone."""
    return survive([view_round(model, views)], data, device=device, batch_size=batch_size, seed=seed).share
