"""A recurrent language model that carries its state from batch to batch."""

import torch
from examples.loops.models import Language, classes
from torch import Tensor
from torch.nn import functional as F


def train(steps: int = 4) -> dict[str, Tensor]:
    model = Language().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hidden = cell = torch.zeros(8, 1, 8, dtype=torch.float64)
    for step in range(steps):
        tokens = classes(step, 12, 8, 7)
        optimizer.zero_grad()
        logits, hidden, cell = model(tokens[:, :-1], hidden.detach(), cell.detach())
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    return model.state_dict()
