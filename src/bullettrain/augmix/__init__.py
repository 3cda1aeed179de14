"""AugMix views on tensors: a whole batch of images at once, on any device, with what Pillow would make of each.

On a GPU nothing waits for the device and no shape depends on a draw: a CUDA graph can capture it; and where Triton is
there, one kernel does all of it.

    maker = ViewMaker(severity=3)
    draws = maker.draw(len(x), generator=generator, device=x.device)   # all that is random
    x1, x2 = maker(x, draws)
"""

from bullettrain.augmix.operations import Operation, operate
from bullettrain.augmix.views import ViewMaker

__all__ = ["Operation", "ViewMaker", "operate"]
