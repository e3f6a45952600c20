"""Direct preference optimization: a policy against a frozen reference."""

import copy

import torch
from examples.loops.models import GPT, classes, log_probability
from torch import Tensor
from torch.nn import functional as F


def train(steps: int = 3) -> dict[str, Tensor]:
    model = GPT().double()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        chosen, rejected = classes(step, 16, 8, 6), classes(step + 100, 16, 8, 6)
        optimizer.zero_grad()
        own = [log_probability(model(tokens)[0], tokens) for tokens in (chosen, rejected)]
        before = [log_probability(reference(tokens)[0], tokens) for tokens in (chosen, rejected)]
        margin = (own[0] - before[0]) - (own[1] - before[1])
        loss = -F.logsigmoid(0.1 * margin).mean()
        loss.backward()
        optimizer.step()
    return model.state_dict()
