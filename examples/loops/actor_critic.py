"""An actor and its critic: two losses of one network."""

from functools import partial

import torch
from examples.loops.models import Policy, classes, numbers
from torch import Tensor
from torch.nn import functional as F

import echelon


def train(plan: str, steps: int = 4) -> dict[str, Tensor]:
    model = Policy().double()
    engine = echelon.parallelize(model, plan, optimizer=partial(torch.optim.Adam, lr=3e-2))
    for step in range(steps):
        states, rewards = engine.local((numbers(step, 8, 6), numbers(step + 100, 8)))
        actions = engine.local(classes(step, 3, 8))
        log_probabilities, values = engine(states)
        chosen = log_probabilities.gather(1, actions[:, None])[:, 0]
        actor = -(chosen * (rewards - values.detach())).mean()
        critic = F.smooth_l1_loss(values, rewards)
        engine.backward(actor + critic)
        engine.update()
    return engine.full_state_dict()
