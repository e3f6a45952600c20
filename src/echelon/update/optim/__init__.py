"""Optimizers with small state, what an optimizer needs, and how the learning rate moves over a run."""

from echelon.update.optim.adafactor import Adafactor
from echelon.update.optim.learning_rate import LearningRate, Schedule, by_name, constant, cosine, wsd
from echelon.update.optim.needs import Need
from echelon.update.optim.optimizers import CombinedOptimizer
from echelon.update.optim.sm3 import SM3
from echelon.update.optim.sum_optimizer import SumOptimizer

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
