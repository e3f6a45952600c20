"""Images and texts that belong together: a loss over the whole batch."""

from functools import partial

import torch
from examples.loops.models import numbers
from examples.loops.plain.clip import Towers
from torch import Tensor
from torch.nn import functional as F

import echelon


def train(plan: str, steps: int = 4) -> dict[str, Tensor]:
    model = Towers().double()
    engine = echelon.parallelize(model, plan, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    for step in range(steps):
        images, texts = engine.local((numbers(step, 8, 12), numbers(step + 100, 8, 10)))
        similar = [echelon.gather_samples(each) for each in engine(images, texts)]
        logits = 10 * similar[0] @ similar[1].T
        places = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2
        engine.backward(loss)
        engine.update()
    return engine.full_state_dict()
