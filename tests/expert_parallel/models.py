"""Small models with experts and their trainings; importable, so that ranks can build them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from echelon.experts import Gate, SoftmaxGate
from echelon.models import cross_entropy
from echelon.verify import Case
from tests.cases import adamw
from tests.experts.models import EXPERTS, SEQUENCE, VOCAB, WIDTH, make_model


def plain_gate(top_k: int = 2) -> Gate:
    return SoftmaxGate(WIDTH, EXPERTS, top_k)


def tokens(step: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    """Some targets of the first sample are left out."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randint(VOCAB, (2, samples, SEQUENCE), generator=generator)
    targets[0, : 3 + step % 3] = -100
    return inputs, targets


def experts_case(
    make: Callable[[], nn.Module] = partial(make_model, plain_gate),
    samples: int = 8,
    steps: int = 20,
    clip: float | None = 1.0,
) -> Case:
    return Case(make, partial(tokens, samples=samples), cross_entropy, adamw, steps=steps, clip=clip)
