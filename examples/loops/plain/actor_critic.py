"""An actor and its critic: two losses of one network."""

import torch
from examples.loops.models import Policy, classes, numbers
from torch import Tensor
from torch.nn import functional as F


def train(steps: int = 4) -> dict[str, Tensor]:
    model = Policy().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for step in range(steps):
        states, rewards = numbers(step, 8, 6), numbers(step + 100, 8)
        actions = classes(step, 3, 8)
        optimizer.zero_grad()
        log_probabilities, values = model(states)
        chosen = log_probabilities.gather(1, actions[:, None])[:, 0]
        actor = -(chosen * (rewards - values.detach())).mean()
        critic = F.smooth_l1_loss(values, rewards)
        (actor + critic).backward()
        optimizer.step()
    return model.state_dict()
