"""A recurrent language model that carries its state from batch to batch."""

from functools import partial

import torch
from examples.loops.models import Language, classes
from torch import Tensor
from torch.nn import functional as F

import echelon


def train(plan: str, steps: int = 4) -> dict[str, Tensor]:
    model = Language().double()
    engine = echelon.parallelize(model, plan, optimizer=partial(torch.optim.SGD, lr=0.5))
    hidden = cell = engine.local(torch.zeros(8, 1, 8, dtype=torch.float64))
    for step in range(steps):
        tokens = engine.local(classes(step, 12, 8, 7))
        logits, hidden, cell = engine(tokens[:, :-1], hidden.detach(), cell.detach())
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.update()
    return engine.full_state_dict()
