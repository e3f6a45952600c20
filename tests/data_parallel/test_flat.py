"""A unit in flat memory: which part a rank holds, and how parts of gradients add up."""

import pytest
import torch
from torch import nn

from echelon.collectives import RecordingGroup
from echelon.data_parallel.flat import FlatUnit


def make_unit(rank: int = 0, ranks: int = 2, *, resident: bool = True) -> FlatUnit:
    """Seven elements, so that parts are of four and the last is padded."""
    first = nn.Parameter(torch.arange(3.0))
    second = nn.Parameter(torch.arange(3.0, 7.0).view(2, 2))
    group = RecordingGroup("data", rank, ranks)
    return FlatUnit("unit", [("first", first), ("second", second)], group, resident=resident)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, [("first", 0, [0, 1, 2]), ("second", 0, [3])]), (1, [("second", 1, [4, 5, 6])])],
)
def test_a_rank_holds_the_runs_of_its_part_and_no_padding(rank: int, expected: list[object]) -> None:
    local = make_unit(rank).local_parameters()
    assert [(each.name, each.begin, each.tensor.tolist()) for each in local] == expected


def test_an_update_of_a_run_is_one_of_the_weights() -> None:
    unit = make_unit(1)
    (run,) = unit.local_parameters()
    with torch.no_grad():
        run.tensor.fill_(9.0)
    assert unit.parameters[1][1].tolist() == [[3, 9], [9, 9]]


def test_weights_that_are_freed_are_not_numbers_and_come_back() -> None:
    unit = make_unit(ranks=1, resident=False)
    unit.free()
    assert not unit.is_gathered
    assert unit.flat.untyped_storage().nbytes() == 0
    assert all(parameter.isnan().all() for _, parameter in unit.parameters)
    unit.gather()
    unit.synchronize()
    assert [parameter.tolist() for _, parameter in unit.parameters] == [[0, 1, 2], [[3, 4], [5, 6]]]


def test_weights_that_stay_are_not_freed() -> None:
    unit = make_unit()
    unit.free()
    assert unit.is_gathered
    assert unit.parameters[0][1].tolist() == [0, 1, 2]


def test_parts_of_several_microbatches_add_up_and_a_new_step_starts_again() -> None:
    unit = make_unit(1)
    (run,) = unit.local_parameters()
    for _ in range(2):  # steps
        unit.has_part = False
        for value in (1.0, 10.0, 100.0):
            part = unit.new_part(in_place=False)
            part.fill_(value)
            unit.add_part(part)
        assert unit.part_of_gradient(run).tolist() == [111.0] * 3


def test_a_part_in_place_is_that_of_the_whole_gradient() -> None:
    unit = make_unit(1)
    for _, parameter in unit.parameters:
        parameter.grad = parameter.detach().clone()
        unit.accumulate(parameter)
    assert unit.close_gradient().tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert unit.new_part(in_place=True).tolist() == [4, 5, 6, 0]


def test_a_gradient_that_is_taken_is_no_longer_the_parameters() -> None:
    unit = make_unit()
    _, parameter = unit.parameters[0]
    parameter.grad = torch.ones(3)
    unit.accumulate(parameter)
    assert unit.take_gradient().tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert unit.gradient is None
    assert all(parameter.grad is None for _, parameter in unit.parameters)


def test_moving_to_new_memory_leaves_the_old_to_who_holds_it() -> None:
    unit = make_unit(1)
    before = unit.parameters[1][1].data
    (run,) = unit.local_parameters()
    unit.reallocate()
    with torch.no_grad():
        run.tensor.fill_(9.0)
    assert before.tolist() == [[3, 4], [5, 6]]
    assert unit.parameters[1][1].tolist() == [[3, 9], [9, 9]]
