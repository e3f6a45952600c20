"""A diffusion transformer that learns to remove noise, and the average of its weights."""

import torch
from examples.loops.models import Block, numbers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def denoiser() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), Block(16), Block(16), nn.Linear(16, 4))


def train(steps: int = 4) -> dict[str, Tensor]:
    model = denoiser().double()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        clean, noise = numbers(step, 8, 6, 4), numbers(step + 100, 8, 6, 4)
        time = numbers(step + 200, 8, 1, 1).sigmoid()
        optimizer.zero_grad()
        loss = F.mse_loss(model(clean * (1 - time) + noise * time), noise)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
    return average.module.state_dict()
