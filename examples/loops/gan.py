"""A generator, and a discriminator that judges it."""

from functools import partial

import torch
from examples.loops.models import discriminator, generator, judge, numbers
from torch import Tensor

import echelon


def train(plan: str, steps: int = 4) -> dict[str, Tensor]:
    net_g, net_d = generator().double(), discriminator().double()
    net_g = echelon.parallelize(net_g, plan, optimizer=partial(torch.optim.SGD, lr=0.1))
    net_d = echelon.parallelize(net_d, plan, optimizer=partial(torch.optim.SGD, lr=0.1))
    for step in range(steps):
        real, noise = net_g.local((numbers(step, 8, 8), numbers(step + 100, 8, 4)))
        net_d.backward(judge(net_d(real), 1.0))
        fake = net_g(noise)
        net_d.backward(judge(net_d(fake.detach()), 0.0))
        net_d.update()
        net_g.backward(judge(net_d(fake), 1.0))
        net_g.update()
    weights = {"g." + name: value for name, value in net_g.full_state_dict().items()}
    return weights | {"d." + name: value for name, value in net_d.full_state_dict().items()}
