"""Around the optimizer: how the learning rate moves over a run."""

from echelon.optim.schedules import Schedule, by_name, constant, cosine, wsd

__all__ = ["Schedule", "by_name", "constant", "cosine", "wsd"]
