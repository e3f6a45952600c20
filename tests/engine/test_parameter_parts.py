"""Where parts of parameters lie in whole ones, and how optimizers add up sums over them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from echelon import parallelize
from echelon.launching import Ranks
from echelon.optim import SM3, Adafactor
from tests.cases import Perceptron, mean_loss, vectors
from tests.engine.test_updates import update_of

Warm = Callable[[int], Ranks]


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize(
    ("plan", "boxes"),
    [
        ("data=2", [(4, 6)]),
        ("data=2 zero=1", [(2, 6), (1, 2)]),  # the first 14 of 28 elements
        ("data=2 tensor=2", [(4, 6)]),
    ],
)
def test_a_part_is_boxes_of_the_whole_parameter(plan: str, boxes: list[tuple[int, int]]) -> None:
    update, _ = update_of(plan, Adafactor)
    optimizer = update.optimizer
    assert isinstance(optimizer, Adafactor)
    exchange = optimizer._work[0].exchange
    assert set(exchange.shapes) == {(4, 6), (4,), (5, 4), (5,)}
    matrix = exchange.shapes.index((4, 6))
    (part,) = [part for part in exchange.parts.values() if part.number == matrix]
    assert [tuple(s.stop - s.start for s in box) for box in part.boxes] == boxes


@pytest.mark.parametrize(("kind", "messages"), [(Adafactor, 2), (SM3, 1)])
def test_ranks_send_few_messages_for_all_parameters(kind: Any, messages: int, warm_ranks: Warm) -> None:
    for moved in warm_ranks(2).run(count_messages, kind):
        assert moved == [("all_reduce", messages)] * 3


def count_messages(kind: Any) -> list[tuple[str, int]]:
    torch.manual_seed(0)
    with parallelize(
        Perceptron(), "data=2 zero=1", optimizer=partial(kind, lr=0.01), loss=mean_loss
    ) as engine:
        seen = []
        for step in range(3):
            engine.step(engine.local(vectors(step)))
            moves = [move for move in engine.ledger.moves if move.subject == "optimizer"]
            seen.append((moves[0].operation, len(moves)))
        return seen


def test_state_is_counted_with_the_memory_of_the_optimizer(warm_ranks: Warm) -> None:
    for adamw, adafactor, muon in warm_ranks(2).run(optimizer_bytes):
        assert adafactor < adamw / 10
        assert 0 < muon < 3 * adamw


def optimizer_bytes() -> list[int]:
    found = []
    for kind in (torch.optim.AdamW, Adafactor, torch.optim.Muon):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(64, 5, bias=False)
        )
        with parallelize(model, "data=2 zero=1", optimizer=partial(kind, lr=0.01), loss=mean_loss) as engine:
            engine.step(engine.local(vectors(0)))
            found.append(engine.memory().now["optimizer"])
    return found
