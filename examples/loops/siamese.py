"""Pairs of images, which are the same kind or not."""

from functools import partial

import torch
from examples.loops.models import Classifier, classes, numbers
from torch import Tensor
from torch.nn import functional as F

import echelon


def train(plan: str, steps: int = 4) -> dict[str, Tensor]:
    model = Classifier().double()
    engine = echelon.parallelize(model, plan, optimizer=partial(torch.optim.Adadelta, lr=1.0))
    for step in range(steps):
        one, other = engine.local((numbers(step, 8, 1, 8, 8), numbers(step + 100, 8, 1, 8, 8)))
        same = engine.local(classes(step, 2, 8).double())
        distance = (engine(one) - engine(other)).square().sum(1)
        loss = F.binary_cross_entropy_with_logits(1 - distance, same)
        engine.backward(loss)
        engine.update()
    return engine.full_state_dict()
