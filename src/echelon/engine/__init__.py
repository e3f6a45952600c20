"""parallelize() and the engine it returns."""

from echelon.engine.engine import Engine
from echelon.engine.metrics import Evaluation, Metrics
from echelon.engine.parallelize import parallelize

# What every training rank will import (the first step of a torch optimizer imports torch._dynamo, which
# takes seconds): give it to `echelon.launching.preload` before ranks are launched to train.
TRAINING_MODULES = ("echelon.engine", "torch._dynamo")

__all__ = ["TRAINING_MODULES", "Engine", "Evaluation", "Metrics", "parallelize"]
