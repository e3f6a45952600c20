"""parallelize() and the engine it returns."""

from echelon.engine.engine import Engine
from echelon.engine.parallelize import parallelize
from echelon.engine.step.metrics import Evaluation, Metrics

__all__ = ["Engine", "Evaluation", "Metrics", "parallelize"]
