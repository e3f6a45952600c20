"""Gates with weights that are not all alike, and checks against formulas written out with loops."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from echelon.nn.dropout.modules import key_dropout
from echelon.nn.dropout.training_position import scope
from echelon.nn.experts import (
    Gate,
    Routing,
    recording,
)
from echelon.nn.wrapping import Wrapping
from tests.nn.experts import reference
from tests.nn.experts.reference import Slots
from tests.nn.experts.statistics import Kept

SAMPLES, POSITIONS, WIDTH, EXPERTS = 2, 5, 6, 4
DOUBLE = torch.float64


@contextmanager
def step() -> Iterator[None]:
    with scope(seed=3, step=1, first_sample=0):
        yield


def prepare(gate: Gate) -> Gate:
    """The gate in float64, with weights that are not all alike."""
    torch.manual_seed(1)
    gate.double()
    for parameter in gate.parameters():
        nn.init.normal_(parameter)
    key_dropout(gate, Wrapping())
    return gate


def inputs() -> Tensor:
    return torch.randn(SAMPLES, POSITIONS, WIDTH, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))


def route(gate: Gate, x: Tensor) -> tuple[Routing, Tensor]:
    kept = Kept()
    with step(), recording(kept):
        routing = gate(x)
    (statistics,) = kept.passes
    return routing, statistics


def check_slots(routing: Routing, expected: list[Slots]) -> None:
    assert routing.indices.tolist() == [[expert for expert, _ in slots] for slots in expected]
    weights = torch.tensor([[weight for _, weight in slots] for slots in expected], dtype=DOUBLE)
    torch.testing.assert_close(routing.weights, weights, rtol=0, atol=1e-12)


def check_row(gate: Gate, statistics: Tensor, name: str, expected: list[float]) -> None:
    row = statistics[gate.rows.index(name)]
    torch.testing.assert_close(row, torch.tensor(expected, dtype=DOUBLE), rtol=0, atol=1e-10)


def check_loss(gate: Gate, statistics: Tensor, expected: float) -> None:
    assert gate.has_loss
    assert float(gate.auxiliary_loss(statistics).detach()) == pytest.approx(expected, abs=1e-10)


def count(slots: list[Slots], num_experts: int = EXPERTS) -> list[float]:
    return [float(sum(expert == i for each in slots for expert, _ in each)) for i in range(num_experts)]


def column_sums(rows: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def logits_of(weight: Tensor, x: Tensor) -> list[list[float]]:
    return [reference.dot(weight.tolist(), token) for token in x.flatten(0, 1).tolist()]


def z_of(logits: list[list[float]]) -> float:
    return sum(math.log(sum(map(math.exp, each))) ** 2 for each in logits) / len(logits)
