"""The training of a small language model with a gate of each kind, for tests."""

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

from echelon.models import cross_entropy
from echelon.verify import Case
from tests.cases import adamw
from tests.nn.experts.all_gates import GATES
from tests.nn.experts.models import SEQUENCE, VOCAB, make_model


def tokens(step: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randint(VOCAB, (2, samples, SEQUENCE), generator=generator)
    targets[0, : 3 + step % 3] = -100
    return inputs, targets


def case(gate: str, plan: str = "", **changes: Any) -> Case:
    whole = Case(partial(make_model, GATES[gate]), tokens, cross_entropy, adamw, steps=6)
    given = {"clip": None} if "backward" in plan else {}
    return dataclasses.replace(whole, **(given | changes))
