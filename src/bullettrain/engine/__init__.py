"""The engine: one training step of Algorithm 2, and the same captured as CUDA graphs."""

from bullettrain.engine.captured import Captured
from bullettrain.engine.step import BulletTrain, StepOutput

__all__ = ["BulletTrain", "Captured", "StepOutput"]
