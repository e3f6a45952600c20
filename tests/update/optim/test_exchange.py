"""Statistics in one buffer, and who sums how much of it."""

import torch
from torch import Tensor

from echelon.collectives import Ledger, RecordingGroup
from echelon.update.optim.exchange import (
    Exchange,
    Round,
    Shape,
    StatisticsBuffer,
    add_in_turns,
    maximum_in_turns,
    without_ranks,
)


def rows_and_columns(shape: Shape) -> list[Shape]:
    return [(), (shape[0], 1), (1, shape[1])]


def test_one_message_serves_all_parameters_and_another_those_that_are_split() -> None:
    ledger = Ledger()
    shard, tensor = (RecordingGroup(axis, 0, 2, ledger) for axis in ("shard", "tensor"))
    exchange = Exchange(
        [(2, 3), (4, 5)], {}, [Round(shard, 2), Round(tensor, 1)], torch.float64, torch.device("cpu")
    )
    buffer = StatisticsBuffer(exchange, rows_and_columns)
    buffer.reduce("sum")
    assert [ledger.total(axis).count for axis in ("shard", "tensor")] == [1, 1]
    assert ledger.total("shard").payload == 8 * (1 + 2 + 3 + 1 + 4 + 5), "both parameters"
    assert ledger.total("tensor").payload == 8 * (1 + 2 + 3), "the first"


def test_statistics_are_views_of_one_memory_and_are_cleared_together() -> None:
    exchange = Exchange([(2, 3), (4, 5)], {}, (), torch.float32, torch.device("cpu"))
    buffer = StatisticsBuffer(exchange, rows_and_columns)
    buffer[0][1].fill_(1.0)
    buffer[1][2].fill_(2.0)
    assert [tuple(view.shape) for view in buffer[1]] == [(), (4, 1), (1, 5)]
    assert float(buffer[0][0]) == float(buffer[1][0]) == 0
    buffer.clear()
    assert not buffer[0][1].any()
    assert not buffer[1][2].any()


def test_boxes_that_share_rows_are_added_one_after_the_other() -> None:
    total = torch.zeros(3)
    targets: list[list[Tensor]] = [[total, total[:2]], [total[2:]]]
    add_in_turns(targets, [[torch.ones(3), torch.ones(2)], [torch.ones(1)]])
    assert total.tolist() == [2, 2, 2]


def test_parameters_of_each_device_and_type_have_an_exchange() -> None:
    low, single, double = (torch.zeros(2, 3, dtype=d) for d in (torch.bfloat16, torch.float32, torch.float64))
    first, second = without_ranks([low, single, double])
    assert (first.dtype, list(first.parts)) == (torch.float32, [low, single]), "sums of bf16 are in float32"
    assert (second.dtype, list(second.parts)) == (torch.float64, [double])


def test_a_round_begins_behind_those_that_are_skipped() -> None:
    assert Round(RecordingGroup("shard"), 2).skipped == 0
    ledger = Ledger()
    rounds = [Round(RecordingGroup("shard", 0, 2, ledger), 2, 1)]
    buffer = StatisticsBuffer(
        Exchange([(2, 3), (4, 5), (6, 7)], {}, rounds, torch.float64, torch.device("cpu")), rows_and_columns
    )
    buffer.reduce("sum")
    assert ledger.total("shard").payload == 8 * (1 + 4 + 5), "the second"
    assert buffer.dtype == torch.float64


def test_the_larger_of_boxes_that_share_rows() -> None:
    total = torch.tensor([1.0, 5.0, 0.0])
    targets: list[list[Tensor]] = [[total, total[:2]], [total[2:]]]
    maximum_in_turns(targets, [[torch.full((3,), 2.0), torch.full((2,), 3.0)], [torch.full((1,), 9.0)]])
    assert total.tolist() == [3, 5, 9]
