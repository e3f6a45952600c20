"""An image classifier."""

from functools import partial

import torch
from examples.loops.models import Classifier, classes, numbers
from torch import Tensor
from torch.nn import functional as F

import echelon


def train(plan: str, steps: int = 4) -> dict[str, Tensor]:
    model = Classifier().double()
    engine = echelon.parallelize(model, plan, optimizer=partial(torch.optim.SGD, lr=0.1))
    for step in range(steps):
        images, labels = engine.local((numbers(step, 8, 1, 8, 8), classes(step, 5, 8)))
        loss = F.cross_entropy(engine(images), labels)
        engine.backward(loss)
        engine.update()
    return engine.full_state_dict()
