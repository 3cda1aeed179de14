"""Accuracy on clean images, and on the worst of several attacks on each image."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bullettrain.attacks import Norm, bare, frozen, pgd
from bullettrain.augmix import ViewMaker
from bullettrain.data import ImageSet, to_unit
from bullettrain.data.base import derive_seed

Tick = Callable[[int], None]
"""Told after each batch how many images it had."""


def clean_accuracy(
    model: nn.Module, data: ImageSet, *, device: torch.device, batch_size: int = 500, tick: Tick | None = None
) -> float:
    """Share of ``data`` that the network, in eval mode and float32, classifies correctly."""
    net = bare(model)

    def correct(x: Tensor, y: Tensor, index: int) -> Tensor:
        return _correct(net, x, y)

    return _share(correct, data, device, batch_size, tick)


def robust_accuracy(
    model: nn.Module,
    data: ImageSet,
    *,
    eps: float,
    steps: int,
    step_size: float,
    restarts: int = 1,
    norm: str | Norm = "linf",
    device: torch.device,
    batch_size: int = 500,
    seed: int = 0,
    tick: Tick | None = None,
) -> float:
    """Share of ``data`` that survives every one of ``restarts`` PGD attacks from uniform starts.

    Images that are lost already, clean or in an earlier restart, are not attacked again. The noise of a batch
    depends on ``seed`` and its place alone.
    """
    net = bare(model)

    def survives(x: Tensor, y: Tensor, index: int) -> Tensor:
        alive = _correct(net, x, y)
        for restart in range(restarts):
            rows = alive.nonzero()[:, 0]
            if len(rows) == 0:
                break
            generator = torch.Generator(device).manual_seed(derive_seed(seed, index, restart))
            x_adv = pgd(
                net,
                x[rows],
                y[rows],
                eps=eps,
                steps=steps,
                step_size=step_size,
                norm=norm,
                random_start="uniform",
                generator=generator,
            )
            alive[rows] = _correct(net, x_adv, y[rows])
        return alive

    return _share(survives, data, device, batch_size, tick)


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

    def correct(x: Tensor, y: Tensor, index: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(derive_seed(seed, index, "views"))
        draws = views.draw(len(x), 1, generator=generator, device=device)
        return _correct(net, views(x, draws)[0], y)

    return _share(correct, data, device, batch_size, tick)


def _correct(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with frozen(net), torch.no_grad():
        logits: Tensor = net(x)
    return logits.argmax(dim=1) == y


def _share(
    judge: Callable[[Tensor, Tensor, int], Tensor],
    data: ImageSet,
    device: torch.device,
    batch_size: int,
    tick: Tick | None,
) -> float:
    """Mean of what ``judge`` says of each image. Several processes take turns at the batches and add up."""
    together = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    count = torch.zeros((), dtype=torch.int64, device=device)
    for index, (x, y) in enumerate(_batches(data, device, batch_size)):
        if index % world == rank:
            count += judge(x, y, index).sum()
        if tick is not None:
            tick(len(y))
    if together:
        dist.all_reduce(count)
    return int(count) / len(data)


def _batches(data: ImageSet, device: torch.device, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for at in range(0, len(data), batch_size):
        rows = slice(at, at + batch_size)
        yield to_unit(data.images[rows].to(device)), data.labels[rows].to(device)
