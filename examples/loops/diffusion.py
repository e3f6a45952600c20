"""A diffusion transformer that learns to remove noise, and the average of its weights."""

from functools import partial

import torch
from examples.loops.models import numbers
from examples.loops.plain.diffusion import denoiser
from torch import Tensor
from torch.nn import functional as F

import echelon


def train(plan: str, steps: int = 4) -> dict[str, Tensor]:
    model = denoiser().double()
    engine = echelon.parallelize(model, plan, optimizer=partial(torch.optim.AdamW, lr=1e-2), average=0.9)
    for step in range(steps):
        clean, noise = engine.local((numbers(step, 8, 6, 4), numbers(step + 100, 8, 6, 4)))
        time = engine.local(numbers(step + 200, 8, 1, 1)).sigmoid()
        loss = F.mse_loss(engine(clean * (1 - time) + noise * time), noise)
        engine.backward(loss)
        engine.update()
    return engine.full_state_dict(averaged=True)
