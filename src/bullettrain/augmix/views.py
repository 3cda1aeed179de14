"""AugMix views: chains of operations, mixed with each other and with the image, as draws decide."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from bullettrain.augmix.operations import ALL, FEW, MOST, Operation, maps_of, operate, tones_of
from bullettrain.precision import accumulation_dtype, at_least_float32

SMALL = 17 * 23
"""Pixels below which images are not for the kernel: the smallest that it has been tried with on a GPU."""


@dataclass(frozen=True)
class ViewMaker:
    """What AugMix views are made of: (1 − m)·image + m·Σ w_i·chain_i, with draws of each image's own.

    Args:
        severity: levels are drawn from U(0.1, severity); 0.1 to 10.
        width: chains, mixed with weights from Dirichlet(1, …, 1).
        depth: operations a chain; −1: 1 to 3, drawn for each.
        all_ops: also colour, contrast, brightness and sharpness, which test corruptions share.
    """

    severity: float = 3.0
    width: int = 3
    depth: int = -1
    all_ops: bool = False

    def __post_init__(self) -> None:
        if not 0.1 <= self.severity <= MOST:
            raise ValueError(f"severity is {self.severity}; it has to lie in [0.1, {MOST:g}]")
        if self.width < 1:
            raise ValueError(f"width is {self.width}; a view has at least one chain")
        if self.depth < 1 and self.depth != -1:
            raise ValueError(f"depth is {self.depth}; give the operations of a chain, or -1 for 1 to 3 at random")

    @property
    def links(self) -> int:
        """Operations of the longest chain."""
        return 3 if self.depth == -1 else self.depth

    @property
    def numbers(self) -> int:
        """Draws that one view takes."""
        return 1 + self.width * (2 + 3 * self.links)

    def draw(
        self,
        n: int,
        views: int = 2,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """All that is random about n images' views: (n, views, numbers), uniform in [0, 1)."""
        place = torch.device(device)
        return torch.rand(n, views, self.numbers, generator=generator, device=place, dtype=accumulation_dtype(place))

    def leave_alone(self, draws: Tensor, which: Tensor) -> Tensor:
        """The same ``draws`` (n, v, numbers), but that images ``which``, booleans (n,), are mixed with no chain."""
        draws = draws.clone()
        draws[:, :, 0] *= ~which[:, None]
        return draws

    def __call__(self, x: Tensor, draws: Tensor) -> Tensor:
        """The views (v, n, C, H, W) of images x (n, C, H, W) in [0, 1] that ``draws`` (n, v, numbers) decide.

        The chains work on bytes: x·255, rounded, which of images that came as bytes is exact.
        """
        if x.ndim != 4:
            raise ValueError(f"x has the shape {tuple(x.shape)}; AugMix makes views of images, (n, C, H, W)")
        if self.all_ops and x.shape[1] not in (1, 3):
            raise ValueError(f"x has {x.shape[1]} channels; with all_ops AugMix takes grey or colour images, 1 or 3")
        if draws.ndim != 3 or draws.shape[::2] != (len(x), self.numbers):
            wanted = f"({len(x)}, views, {self.numbers})"
            raise ValueError(f"draws have the shape {tuple(draws.shape)}; {len(x)} images need {wanted}")
        share, weights, operation, level = self.choices(draws)
        image = at_least_float32(x.detach())
        pixels = (image * 255).round().to(torch.uint8)
        share, weights = share.to(image.dtype), weights.to(image.dtype)
        factor = share[:, None] * weights / 255
        mixed = (1 - share)[..., None, None, None] * image
        if self.all_ops or not _add_chains_in_one_kernel(mixed, pixels, factor, operation, level):
            add_chains(mixed, pixels, factor, operation, level, enhancing=self.all_ops)
        return mixed.to(x.dtype)

    def choices(self, draws: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What draws (n, v, numbers) decide.

        Returns:
            share: (v, n), the m of Beta(1, 1) by which the chains count.
            weights: (v, width, n) of Dirichlet(1, …, 1), which add up to 1 over the chains.
            operation: (v, width, n, links) of :class:`Operation`; NONE past the end of a chain.
            level: (v, width, n, links), below 0 for the other direction.
        """
        n, views, _ = draws.shape
        parts = [1, self.width, self.width, 3 * self.width * self.links]
        share, weights, depth, links = torch.split(draws.movedim(0, -1), parts, dim=1)
        weights = -torch.log1p(-weights)  # exponential draws over their sum are Dirichlet(1, …, 1)
        weights = weights / weights.sum(dim=1, keepdim=True)
        operation, level, sign = links.view(views, 3, self.width, self.links, n).movedim(3, -1).unbind(dim=1)
        operation = (operation * (ALL if self.all_ops else FEW)).long()
        level = (0.1 + (self.severity - 0.1) * level) * torch.where(sign > 0.5, -1.0, 1.0)
        if self.depth == -1:
            at = torch.arange(self.links, device=draws.device)
            operation = torch.where(at <= (3 * depth)[..., None].floor(), operation, int(Operation.NONE))
        return share[:, 0], weights, operation, level


# ----------------------------------------------------------------------------------------------- chains


def add_chains(
    mixed: Tensor, pixels: Tensor, factor: Tensor, operation: Tensor, level: Tensor, *, enhancing: bool = True
) -> None:
    """Add factor · chain to each view, chain by chain.

    Args:
        mixed: views so far, floating (v, n, C, H, W); changed in place.
        pixels: the images, uint8 (n, C, H, W).
        factor: (v, width, n), by which each chain's bytes count.
        operation, level: (v, width, n, links), as :func:`operate` takes them.
        enhancing: whether the last four operations may be among them.
    """
    chains = pixels.expand(*factor.shape, *pixels.shape[1:]).flatten(0, 2)
    chains = operate(chains, operation.flatten(0, 2), level.flatten(0, 2), enhancing=enhancing)
    chains = chains.view(*factor.shape, *pixels.shape[1:])
    for i in range(factor.shape[1]):  # all chains at once would be as many batches of floats
        mixed += factor[:, i, :, None, None, None] * chains[:, i]


_no_kernel: list[str] = []
"""Why chains are not added in one kernel, if that was tried in vain."""


def _wants_kernel(images: Tensor) -> bool:
    """On a GPU, unless it failed before; small images are little work anyway."""
    return images.is_cuda and images.shape[-2] * images.shape[-1] >= SMALL and not _no_kernel


def _is_capturing(images: Tensor) -> bool:
    return images.is_cuda and torch.cuda.is_current_stream_capturing()


def _add_chains_in_one_kernel(mixed: Tensor, pixels: Tensor, factor: Tensor, operation: Tensor, level: Tensor) -> bool:
    """:func:`add_chains` without the last four operations, on a GPU that has Triton; whether it was done."""
    if not _wants_kernel(mixed):
        return False
    try:
        from bullettrain.augmix import kernel

        maps, tones = maps_of(operation, level, *pixels.shape[2:]), tones_of(operation, level.abs())
        kernel.add_chains(mixed, pixels, factor, operation, maps, tones)
    except torch.OutOfMemoryError:  # the other way needs more
        raise
    except Exception as error:  # no Triton, no C compiler for what launches its kernels, a device it does not know
        if _is_capturing(mixed):  # there is no other way out of that
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        _no_kernel.append(reason)
        warnings.warn(f"AugMix views take several times as long: Triton cannot make them ({reason})", stacklevel=3)
        return False
    return True
