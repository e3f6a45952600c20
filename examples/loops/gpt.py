"""A GPT that computes its own loss, with accumulated gradients."""

from functools import partial

import torch
from examples.loops.models import GPT, classes
from torch import Tensor

import echelon


def train(plan: str, steps: int = 3) -> dict[str, Tensor]:
    model = GPT().double()
    engine = echelon.parallelize(model, plan, optimizer=partial(torch.optim.SGD, lr=0.1))
    for step in range(steps):
        for part in range(2):
            tokens = engine.local(classes(2 * step + part, 16, 8, 9))
            _, loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss / 2)
        engine.update()
    return engine.full_state_dict()
