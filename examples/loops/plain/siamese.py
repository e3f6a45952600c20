"""Pairs of images, which are the same kind or not."""

import torch
from examples.loops.models import Classifier, classes, numbers
from torch import Tensor
from torch.nn import functional as F


def train(steps: int = 4) -> dict[str, Tensor]:
    model = Classifier().double()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for step in range(steps):
        one, other = numbers(step, 8, 1, 8, 8), numbers(step + 100, 8, 1, 8, 8)
        same = classes(step, 2, 8).double()
        optimizer.zero_grad()
        distance = (model(one) - model(other)).square().sum(1)
        loss = F.binary_cross_entropy_with_logits(1 - distance, same)
        loss.backward()
        optimizer.step()
    return model.state_dict()
