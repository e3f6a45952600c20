"""Small trainings for pipelines, which ranks can build: a deep GPT, and layers to cut between."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from echelon.models import ModelConfig, build
from echelon.verify import Case
from tests.cases import adamw, mean_loss, random_tokens, vectors
from tests.contract_models import token_loss

VOCAB, SEQUENCE, WIDTH = 7, 4, 6

# With embedding and head six layers: three chunks on each of two ranks have one each.
SHALLOW = ModelConfig("gpt", layers=4, width=8, heads=2, vocab=VOCAB, sequence=SEQUENCE, ffn=8, tied=True)
DEEP = dataclasses.replace(SHALLOW, layers=10)  # and three on each of four


def shallow() -> nn.Module:
    return build(SHALLOW)


def untied() -> nn.Module:
    return build(dataclasses.replace(SHALLOW, tied=False))


def dropping() -> nn.Module:
    return build(dataclasses.replace(SHALLOW, dropout=0.1))


def untied_dropping() -> nn.Module:
    return build(dataclasses.replace(SHALLOW, tied=False, dropout=0.1))


def deep() -> nn.Module:
    return build(DEEP)


def untied_deep() -> nn.Module:
    return build(dataclasses.replace(DEEP, tied=False))


def dropping_deep() -> nn.Module:
    return build(dataclasses.replace(DEEP, dropout=0.1))


def tokens(step: int, samples: int = 13) -> tuple[Tensor, Tensor]:
    """Samples that no number of microbatches here divides; some targets do not count."""
    return random_tokens(step, (samples, SEQUENCE), VOCAB)


def gpt_case(make_model: Callable[[], nn.Module] = shallow, **changes: Any) -> Case:
    return Case(make_model, tokens, token_loss, **({"make_optimizer": adamw} | changes))


def asynchronous_case(make_model: Callable[[], nn.Module] = untied, **changes: Any) -> Case:
    """What PipeDream can train: no clipping, no ties."""
    return gpt_case(make_model, **({"clip": None} | changes))


def vector_case(make_model: Callable[[], nn.Module], **changes: Any) -> Case:
    given = {"make_optimizer": adamw, "make_batch": vectors, "loss": mean_loss, "steps": 4} | changes
    return Case(make_model, **given)  # type: ignore[arg-type]


class Hidden(nn.Module):
    """Six features to six: a layer like any other."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def perceptron(layers: int = 4) -> nn.Sequential:
    """Plain layers, and a head for the five classes of `vectors`."""
    return nn.Sequential(*(Hidden() for _ in range(layers - 1)), nn.Linear(WIDTH, 5))
