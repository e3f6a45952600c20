"""Where parts of parameters lie in whole ones, and how optimizers add up sums over them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from echelon import parallelize
from echelon.launching import Ranks
from echelon.state.ownership import Slice
from echelon.update.optim import SM3, Adafactor
from echelon.update.optim.sum_optimizer import Box, whole_box
from echelon.update.parameter_parts import assign
from tests.cases import Perceptron, mean_loss, vectors
from tests.engine.test_updates import update_of

Warm = Callable[[int], Ranks]


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize(
    ("plan", "boxes"),
    [
        ("data=2", [None]),
        ("data=2 zero=2", [(2, 6), (1, 2)]),  # the first 14 of 28 elements
        ("data=2 tensor=2", [None]),
    ],
)
def test_a_part_is_boxes_of_the_whole_parameter(plan: str, boxes: list[tuple[int, int] | None]) -> None:
    update, _ = update_of(plan, Adafactor)
    optimizer = update.optimizer
    assert isinstance(optimizer, Adafactor)
    exchange = optimizer._work[0].exchange
    assert set(exchange.shapes) == {(4, 6), (4,), (5, 4), (5,)}
    matrix = exchange.shapes.index((4, 6))
    (part,) = [part for part in exchange.parts.values() if part.number == matrix]
    assert [_sizes(box) for box in part.boxes] == boxes


def _sizes(box: Box) -> tuple[int, ...] | None:
    """None of a box that is all of a parameter."""
    return None if box == whole_box(box) else tuple(part.stop - part.start for part in box)


@pytest.mark.usefixtures("packed")
def test_statistics_are_owned_whole_and_once() -> None:
    """Of a part of 3 elements, 3 rows would pass for its elements."""
    update, _ = update_of("data=2 zero=2", Adafactor)
    for local in update._stages.local_parameters():
        local.tensor.grad = torch.ones_like(local.tensor)
    update.stepper.step(1.0)
    parts = {each.slice.part for each in update.owned()}
    assert parts == {"value", "step", "normaliser"}
    whole = [(each.slice.part, each.slice.shape, each.slice.is_whole) for each in update.owned_whole()]
    assert sorted(whole) == [
        ("col_var", (1, 4), True),
        ("col_var", (1, 6), True),
        ("row_var", (4, 1), True),
        ("row_var", (5, 1), True),
    ]


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


def box(size: int) -> list[Slice]:
    """Of a parameter of `size` elements."""
    return [Slice("p", "value", (size,), (0,), (1,))]


def test_the_largest_go_first_each_to_whoever_has_the_least() -> None:
    everything = {"a": box(2), "b": box(9), "c": box(5), "d": box(4)}
    assert assign([everything, everything]) == {"b": 0, "c": 1, "d": 1, "a": 0}


def test_only_a_rank_that_holds_a_part_updates() -> None:
    assert assign([{}, {"a": box(2), "b": box(3)}, {"b": box(3)}]) == {"b": 1, "a": 1}
