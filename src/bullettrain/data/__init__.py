"""Datasets: download and read them, and load batches on the device.

`load` reads a dataset into an `ImageSet`, `split_validation` splits off a validation set, and `Loader` yields batches.
`prepare`, `verify` and `available` implement `bullettrain data`.
"""

from bullettrain.data.augment import Augment, Draws, to_unit
from bullettrain.data.base import DataError, ImageSet, root
from bullettrain.data.download import prepare, progress_bar
from bullettrain.data.loader import Loader
from bullettrain.data.sets import NAMES, load, split_validation
from bullettrain.data.sources import SOURCES, available, verify
from bullettrain.data.stored import StoredPerturbations

__all__ = [
    "NAMES",
    "SOURCES",
    "Augment",
    "DataError",
    "Draws",
    "ImageSet",
    "Loader",
    "StoredPerturbations",
    "available",
    "load",
    "prepare",
    "progress_bar",
    "root",
    "split_validation",
    "to_unit",
    "verify",
]
