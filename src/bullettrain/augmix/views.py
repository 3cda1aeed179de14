"""AugMix views: chains of random operations, mixed with each other and with the image."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bullettrain.augmix.operations import ALL, FEW, MOST, Operation, maps_of, operate, tones_of
from bullettrain.precision import accumulation_dtype, at_least_float32
from bullettrain.validation import check_limits, limits

MIN_KERNEL_PIXELS = 17 * 23
"""Minimum pixels of an image for the kernel: the smallest image that it was tested with on a GPU."""


@dataclass(frozen=True)
class ViewMaker:
    """Make AugMix views, (1 − m)·image + m·Σ w_i·chain_i, with separate random numbers for each image.

    Args:
        severity: levels are drawn from U(0.1, severity); 0.1 to 10.
        width: number of chains, mixed with weights from Dirichlet(1, …, 1).
        depth: operations per chain; −1 draws 1 to 3 for each chain.
        all_ops: whether to use colour, contrast, brightness and sharpness, which resemble test corruptions.
    """

    severity: float = field(default=3.0, metadata=limits(least=0.1, most=MOST))
    width: int = field(default=3, metadata=limits(least=1))
    depth: int = -1
    all_ops: bool = False

    def __post_init__(self) -> None:
        check_limits(self)
        if self.depth < 1 and self.depth != -1:
            raise ValueError(f"depth is {self.depth}; give the operations per chain, or -1 for 1 to 3 at random")

    @property
    def links(self) -> int:
        """Number of operations in the longest chain."""
        return 3 if self.depth == -1 else self.depth

    @property
    def numbers(self) -> int:
        """Number of random numbers per view."""
        return 1 + self.width * (2 + 3 * self.links)

    def draw(
        self,
        n: int,
        views: int = 2,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Draw all random numbers for the views of n images: (n, views, numbers), uniform in [0, 1)."""
        place = torch.device(device)
        return torch.rand(n, views, self.numbers, generator=generator, device=place, dtype=accumulation_dtype(place))

    def leave_alone(self, draws: Tensor, which: Tensor) -> Tensor:
        """Return ``draws`` (n, v, numbers) with which the views of images ``which``, bool (n,), are the images."""
        draws = draws.clone()
        draws[:, :, 0] *= ~which[:, None]
        return draws

    def __call__(self, x: Tensor, draws: Tensor) -> Tensor:
        """Return the views (v, n, C, H, W) of images x (n, C, H, W) in [0, 1] for ``draws`` (n, v, numbers).

        The chains work on bytes, x·255 rounded, which is exact for images that were bytes.
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
        """Convert draws (n, v, numbers) to the parameters of the views.

        Returns:
            share: (v, n), the mixing weight m from Beta(1, 1).
            weights: (v, width, n), the chain weights from Dirichlet(1, …, 1).
            operation: (v, width, n, links) of :class:`Operation`; NONE past the end of a chain.
            level: (v, width, n, links), negative for the opposite direction.
        """
        n, views, _ = draws.shape
        parts = [1, self.width, self.width, 3 * self.width * self.links]
        share, weights, depth, links = torch.split(draws.movedim(0, -1), parts, dim=1)
        weights = -torch.log1p(-weights)  # normalised exponential draws are Dirichlet(1, …, 1)
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
    """Add factor · chain to each view.

    Args:
        mixed: views so far, floating (v, n, C, H, W); changed in place.
        pixels: the images, uint8 (n, C, H, W).
        factor: weight of each chain's bytes, (v, width, n).
        operation, level: (v, width, n, links), as :func:`operate` takes them.
        enhancing: whether the last four operations can occur.
    """
    chains = pixels.expand(*factor.shape, *pixels.shape[1:]).flatten(0, 2)
    chains = operate(chains, operation.flatten(0, 2), level.flatten(0, 2), enhancing=enhancing)
    chains = chains.view(*factor.shape, *pixels.shape[1:])
    for i in range(factor.shape[1]):  # one at a time, to save memory
        mixed += factor[:, i, :, None, None, None] * chains[:, i]


_no_kernel: list[str] = []
"""Why the kernel failed, if it did; it is not tried again."""


def _wants_kernel(images: Tensor) -> bool:
    """Return whether to use the kernel: on a GPU, unless it failed before or the images are small."""
    return images.is_cuda and images.shape[-2] * images.shape[-1] >= MIN_KERNEL_PIXELS and not _no_kernel


def _is_capturing(images: Tensor) -> bool:
    return images.is_cuda and torch.cuda.is_current_stream_capturing()


def _add_chains_in_one_kernel(mixed: Tensor, pixels: Tensor, factor: Tensor, operation: Tensor, level: Tensor) -> bool:
    """Run :func:`add_chains`, without the last four operations, as a Triton kernel. Return whether it succeeded."""
    if not _wants_kernel(mixed):
        return False
    try:
        from bullettrain.augmix import kernel

        maps, tones = maps_of(operation, level, *pixels.shape[2:]), tones_of(operation, level.abs())
        kernel.add_chains(mixed, pixels, factor, operation, maps, tones)
    except torch.OutOfMemoryError:  # the tensor operations need even more memory
        raise
    except Exception as error:  # no Triton, no C compiler for its launcher, or an unsupported device
        if _is_capturing(mixed):  # an error during capture is fatal
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        _no_kernel.append(reason)
        warnings.warn(f"AugMix views take several times as long: Triton cannot make them ({reason})", stacklevel=3)
        return False
    return True
