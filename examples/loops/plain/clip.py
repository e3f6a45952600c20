"""Images and texts that belong together: a loss over the whole batch."""

import torch
from examples.loops.models import numbers
from torch import Tensor, nn
from torch.nn import functional as F


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(12, 6), nn.Linear(10, 6)

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)


def train(steps: int = 4) -> dict[str, Tensor]:
    model = Towers().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        images, texts = numbers(step, 8, 12), numbers(step + 100, 8, 10)
        optimizer.zero_grad()
        similar = model(images, texts)
        logits = 10 * similar[0] @ similar[1].T
        places = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2
        loss.backward()
        optimizer.step()
    return model.state_dict()
