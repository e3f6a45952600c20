"""Trainings with optimizers that need sums over whole parameters, as cases that ranks can import."""

from functools import partial
from typing import Any

import torch

from echelon.update.optim import SM3, Adafactor

# The gradient of an attention's key bias is nothing but rounding. Without an eps above it, both would scale
# it up to a full update.
OPTIMIZERS = {
    "adafactor": partial(Adafactor, lr=1e-2, eps=(1e-8, 1e-3), weight_decay=0.1),
    "sm3": partial(SM3, lr=3e-2, momentum=0.9, eps=1e-8, weight_decay=0.1),
}


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """Matrices are decayed, vectors are not, at another rate."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.dim() > 1]},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0, "lr": 5e-3},
    ]
    return OPTIMIZERS[name](groups)
