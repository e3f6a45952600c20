"""The operators of compiled layers: what torch asks of them, and groups that are gone."""

import gc

import pytest
import torch

from echelon.collectives import Ledger, RecordingGroup
from echelon.errors import UserError
from echelon.parallel.tensor import operators
from echelon.parallel.tensor.operators import RecordedMoves, number_of


def group() -> RecordingGroup:
    return RecordingGroup("tensor", 0, 2, Ledger())


def test_they_are_what_torch_asks_of_operators() -> None:
    here = group()
    number = number_of(here)
    x = torch.zeros(2, 6, 4)
    torch.library.opcheck(operators.sum_over_ranks, (x, number))
    tests = ("test_schema", "test_faketensor")  # values are not defined: nothing is moved
    for operator in (operators.gather_parts, operators.sum_part_over_ranks):
        torch.library.opcheck(operator, (x, number, 2, 1), test_utils=tests)
        torch.library.opcheck(operator, (x.transpose(0, 1), number, 2, 0), test_utils=tests)
    torch.library.opcheck(operators.checked_tokens, (torch.arange(3), 3))


def test_a_sum_leaves_its_input() -> None:
    here, x = group(), torch.ones(3)
    assert RecordedMoves(number_of(here), 2, 0).summed(x).data_ptr() != x.data_ptr()


def test_a_group_has_one_number_and_numbers_are_not_given_again() -> None:
    first, second = group(), group()
    numbers = [int(number_of(each)) for each in (first, second, first)]
    assert numbers[0] == numbers[2] != numbers[1]
    del first
    gc.collect()
    third = group()
    assert int(number_of(third)) not in numbers
    with pytest.raises(RuntimeError, match="the group of its engine is gone; make a new engine"):
        operators.sum_over_ranks(torch.ones(3), torch.tensor(numbers[0]))


def test_a_part_of_a_sum_must_be_whole() -> None:
    with pytest.raises(UserError, match="a sequence of 5 is not divisible by 2"):
        RecordedMoves(torch.tensor(0), 2, 0).summed_part(torch.ones(2, 5), 1)
