"""The common corruptions of CIFAR-10-C and -100-C: nineteen, at five severities, of batches of images.

`corrupt` makes one of a batch, on the device that the batch is on; `make` writes the files of a whole test set.
"""

from bullettrain.corruptions.make import make
from bullettrain.corruptions.overlays import read_overlays
from bullettrain.corruptions.table import AVERAGED, CORRUPTIONS, SEVERITIES, Corruption, corrupt

__all__ = ["AVERAGED", "CORRUPTIONS", "SEVERITIES", "Corruption", "corrupt", "make", "read_overlays"]
