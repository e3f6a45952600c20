"""A generator, and a discriminator that judges it."""

import torch
from examples.loops.models import discriminator, generator, judge, numbers
from torch import Tensor


def train(steps: int = 4) -> dict[str, Tensor]:
    net_g, net_d = generator().double(), discriminator().double()
    optimizer_g = torch.optim.SGD(net_g.parameters(), lr=0.1)
    optimizer_d = torch.optim.SGD(net_d.parameters(), lr=0.1)
    for step in range(steps):
        real, noise = numbers(step, 8, 8), numbers(step + 100, 8, 4)
        net_d.zero_grad()
        judge(net_d(real), 1.0).backward()
        fake = net_g(noise)
        judge(net_d(fake.detach()), 0.0).backward()
        optimizer_d.step()
        net_g.zero_grad()
        judge(net_d(fake), 1.0).backward()
        optimizer_g.step()
    return {**net_g.state_dict(prefix="g."), **net_d.state_dict(prefix="d.")}
