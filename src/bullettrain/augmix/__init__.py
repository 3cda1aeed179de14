"""AugMix views of whole batches, on any device, equal to what Pillow produces for each image.

On a GPU nothing synchronises and no shape depends on random numbers, so a CUDA graph can capture it. With Triton, one
kernel makes the views.

    maker = ViewMaker(severity=3)
    draws = maker.draw(len(x), generator=generator, device=x.device)   # all random numbers
    x1, x2 = maker(x, draws)
"""

from bullettrain.augmix.operations import Operation, operate
from bullettrain.augmix.views import ViewMaker

__all__ = ["Operation", "ViewMaker", "operate"]
