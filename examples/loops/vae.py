"""A variational autoencoder."""

from functools import partial

import torch
from examples.loops.models import VAE, numbers, vae_loss
from torch import Tensor

import echelon


def train(plan: str, steps: int = 4) -> dict[str, Tensor]:
    model = VAE().double()
    engine = echelon.parallelize(model, plan, optimizer=partial(torch.optim.Adam, lr=1e-2))
    for step in range(steps):
        x, noise = engine.local((numbers(step, 8, 12), numbers(step + 100, 8, 4)))
        loss = vae_loss(x, *engine(x, noise))
        engine.backward(echelon.Sum(loss))
        engine.update()
    return engine.full_state_dict()
