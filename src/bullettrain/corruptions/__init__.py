"""The 19 common corruptions of CIFAR-10-C and CIFAR-100-C at five severities, for batches of images.

`corrupt` applies one to a batch, on the device of the batch. `make` writes the files for a whole test set.
"""

from bullettrain.corruptions.make import make
from bullettrain.corruptions.overlays import read_overlays
from bullettrain.corruptions.table import AVERAGED, CORRUPTIONS, SEVERITIES, Corruption, corrupt

__all__ = ["AVERAGED", "CORRUPTIONS", "SEVERITIES", "Corruption", "corrupt", "make", "read_overlays"]
