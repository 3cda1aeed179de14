"""PGD as rounds: a restart each, from a start of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bullettrain.attacks import Norm, frozen, pgd
from bullettrain.attacks.pgd import RandomStart
from bullettrain.evaluation.survival import Round, correct
from bullettrain.precision import wide


def pgd_rounds(
    model: nn.Module,
    *,
    eps: float,
    steps: int,
    step_size: float,
    restarts: int = 1,
    norm: str | Norm = "linf",
    loss: str = "ce",
    random_start: RandomStart | None = "uniform",
    device: torch.device,
) -> list[Round]:
    """One round a restart; an image survives where the last iterate is classified correctly."""

    def survives(x: Tensor, y: Tensor, seed: int) -> Tensor:
        target = None
        if loss == "kl":
            with frozen(model), torch.no_grad():
                target = wide(model(x)).softmax(dim=1)
        x_adv = pgd(
            model,
            x,
            y,
            eps=eps,
            steps=steps,
            step_size=step_size,
            norm=norm,
            loss=loss,
            target=target,
            random_start=random_start,
            generator=torch.Generator(device).manual_seed(seed),
            check=False,  # the images come from bytes
        )
        return correct(model, x_adv, y)

    return [Round(f"restart {number + 1}" if restarts > 1 else "pgd", survives) for number in range(restarts)]
