"""A model and batches whose fp16 gradients overflow where and when a test wants it."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from echelon.verify import Case
from tests.cases import mean_loss, sgd
from tests.marked_gradients import overflow

WIDTH, CLASSES = 8, 5
Place = Literal["rows", "weight"]


class MarkedLayer(nn.Module):
    """Passes the first feature on as it is: 1 marks a sample. Of marked samples the gradients of the layer's
    inputs and of its weights overflow ("rows"), or that of its weight alone ("weight")."""

    def __init__(self, place: Place | None) -> None:
        super().__init__()
        self.place, self.linear = place, nn.Linear(WIDTH - 1, WIDTH - 1)

    def forward(self, x: Tensor) -> Tensor:
        mark, weight = x[:, :1], self.linear.weight
        is_marked = mark > 0.5
        if self.place == "weight":
            weight = overflow(weight, is_marked.any())
        hidden = nn.functional.linear(x[:, 1:], weight, self.linear.bias)
        if self.place == "rows":
            hidden = overflow(hidden, is_marked)
        return torch.cat([mark, torch.tanh(hidden)], 1)


def marked_model(layer: int, place: Place) -> nn.Module:
    """Four layers and a head, of which `layer` overflows."""
    layers = [MarkedLayer(place if number == layer else None) for number in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def marked_vectors(steps: tuple[int, ...], sample: int, step: int) -> tuple[Tensor, Tensor]:
    """Random vectors, of which `sample` is marked in `steps`."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(8, WIDTH, generator=generator)
    inputs[:, 0] = 0.0
    if step in steps:
        inputs[sample, 0] = 1.0
    return inputs, torch.randint(CLASSES, (8,), generator=generator)


def overflow_case(
    layer: int, place: Place, *, steps: tuple[int, ...] = (1, 2), sample: int = 6, **changes: Any
) -> Case:
    """5 steps, of which some overflow, with a momentum that would remember them."""
    defaults = {"steps": 5, "clip": None, "make_optimizer": sgd, "options": {"loss_scale": 1024.0}}
    return Case(
        partial(marked_model, layer, place),
        partial(marked_vectors, steps, sample),
        mean_loss,
        **(defaults | changes),
    )
