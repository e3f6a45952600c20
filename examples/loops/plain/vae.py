"""A variational autoencoder."""

import torch
from examples.loops.models import VAE, numbers, vae_loss
from torch import Tensor


def train(steps: int = 4) -> dict[str, Tensor]:
    model = VAE().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, noise = numbers(step, 8, 12), numbers(step + 100, 8, 4)
        optimizer.zero_grad()
        loss = vae_loss(x, *model(x, noise))
        loss.backward()
        optimizer.step()
    return model.state_dict()
