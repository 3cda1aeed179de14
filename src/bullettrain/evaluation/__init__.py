"""Evaluation: accuracy on clean and on attacked images."""

from bullettrain.evaluation.accuracy import clean_accuracy, robust_accuracy

__all__ = ["clean_accuracy", "robust_accuracy"]
