"""Around the optimizer: how the learning rate moves over a run."""

from echelon.optim.learning_rate import LearningRate
from echelon.optim.schedules import Schedule, by_name, constant, cosine, wsd

__all__ = ["LearningRate", "Schedule", "by_name", "constant", "cosine", "wsd"]
