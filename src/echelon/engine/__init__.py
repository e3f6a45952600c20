"""parallelize() and the engine it returns."""

from echelon.engine.engine import Engine
from echelon.engine.metrics import Evaluation, Metrics
from echelon.engine.parallelize import parallelize

__all__ = ["Engine", "Evaluation", "Metrics", "parallelize"]
