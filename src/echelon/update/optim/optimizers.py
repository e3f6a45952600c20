"""Optimizers by name, for job files. In code, any torch optimizer works."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn

from echelon.update.optim.adafactor import Adafactor
from echelon.update.optim.sm3 import SM3


class Settings(Protocol):
    """The optimizer settings of a job."""

    @property
    def name(self) -> str: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def momentum(self) -> float: ...


def make_optimizer(settings: Settings, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that `settings` name. Vectors (biases, norms) are not decayed."""
    trained = list(parameters)
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    rate = settings.learning_rate
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=settings.momentum, fused=True)
    if settings.name == "sm3":
        return SM3(groups, lr=rate, momentum=settings.momentum)
    if settings.name == "adafactor":
        # What torch takes for float32. In float64, where plans are verified, it would be below rounding.
        return Adafactor(groups, lr=rate, eps=(torch.finfo(torch.float32).eps, 1e-3))
    assert settings.name == "adamw", settings.name
    return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, fused=True)
