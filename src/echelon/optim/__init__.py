"""Optimizers with small state, what an optimizer needs, and how the learning rate moves over a run."""

from echelon.optim.adafactor import Adafactor
from echelon.optim.combined import CombinedOptimizer
from echelon.optim.learning_rate import LearningRate
from echelon.optim.needs import Need
from echelon.optim.schedules import Schedule, by_name, constant, cosine, wsd
from echelon.optim.sm3 import SM3
from echelon.optim.sum_optimizer import SumOptimizer

__all__ = [
    "SM3",
    "Adafactor",
    "CombinedOptimizer",
    "LearningRate",
    "Need",
    "Schedule",
    "SumOptimizer",
    "by_name",
    "constant",
    "cosine",
    "wsd",
]
