"""The engine: one training step of Algorithm 2."""

from bullettrain.engine.step import BulletTrain, StepOutput

__all__ = ["BulletTrain", "StepOutput"]
