"""Accuracy on clean images, attacked images and AugMix views."""

from bullettrain.evaluation.accuracy import clean_accuracy, robust_accuracy
from bullettrain.evaluation.specs import PGD

__all__ = ["PGD", "clean_accuracy", "robust_accuracy"]
