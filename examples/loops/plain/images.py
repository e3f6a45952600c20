"""An image classifier."""

import torch
from examples.loops.models import Classifier, classes, numbers
from torch import Tensor
from torch.nn import functional as F


def train(steps: int = 4) -> dict[str, Tensor]:
    model = Classifier().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        images, labels = numbers(step, 8, 1, 8, 8), classes(step, 5, 8)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return model.state_dict()
