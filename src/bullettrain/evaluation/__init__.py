"""Evaluation: accuracy on clean images, on attacked ones, and on AugMix views."""

from bullettrain.evaluation.accuracy import clean_accuracy, robust_accuracy, view_accuracy

__all__ = ["clean_accuracy", "robust_accuracy", "view_accuracy"]
