"""Collectives along a dim, on real ranks, against the same on one."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from echelon.collectives import Ledger, RecordingGroup
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.parallel.tensor import moves
from echelon.parallel.tensor.moves import (
    GroupMoves,
    RecordedMoves,
    number_of,
    start_sum,
    start_sum_of_part,
)
from echelon.plan import Plan

Warm = Callable[[int], Ranks]
RANKS, SHAPE = 3, (2, 6, 3)


def tensor_of(rank: int) -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def moved(dim: int) -> tuple[Tensor, Tensor, Tensor, bool]:
    """What this rank gathers, sums, and keeps of the sum along `dim`; whether a sum is in place."""
    group = Mesh.join(Plan(tensor=RANKS)).group("tensor")
    x = tensor_of(group.rank)
    here = GroupMoves(group)
    part = here.summed_part(x, dim)
    whole = here.gathered(x, dim)
    total = here.summed(x)
    turned = tensor_of(group.rank).transpose(0, 1)
    assert torch.equal(here.summed(turned), total.transpose(0, 1))  # not contiguous: in new memory
    return whole, total, part, total is x


@pytest.mark.parametrize("dim", [1, 2])
def test_parts_and_sums_are_those_of_all_ranks(warm_ranks: Warm, dim: int) -> None:
    tensors = [tensor_of(rank) for rank in range(RANKS)]
    total = torch.stack(tensors).sum(0)
    for rank, (whole, summed_here, part, in_place) in enumerate(warm_ranks(RANKS).run(moved, dim)):
        assert torch.equal(whole, torch.cat(tensors, dim))
        torch.testing.assert_close(summed_here, total, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(part, total.chunk(RANKS, dim)[rank], rtol=1e-14, atol=1e-14)
        assert in_place


def test_a_sum_can_be_started_and_waited_for() -> None:
    group = RecordingGroup("tensor", 0, 2)
    x = torch.ones(2, 4)
    total, handle = start_sum(x, group)
    handle.wait()
    assert total is x
    part, handle = start_sum_of_part(x, group)
    handle.wait()
    assert part.shape == (2, 2)
    assert [(move.operation, move.subject) for move in group.ledger.moves] == [
        ("all_reduce", "tensor parallelism"),
        ("reduce_scatter", "tensor parallelism"),
    ]


def test_a_sequence_that_ranks_cannot_share_equally_is_refused() -> None:
    with pytest.raises(UserError, match="a sequence of 5 is not divisible by 2; use sequences of a multiple"):
        GroupMoves(RecordingGroup("tensor", 0, 2)).summed_part(torch.ones(2, 5), 1)


# The operators of compiled layers: what torch asks of them, and groups that are gone.


def group() -> RecordingGroup:
    return RecordingGroup("tensor", 0, 2, Ledger())


def test_they_are_what_torch_asks_of_operators() -> None:
    here = group()
    number = number_of(here)
    x = torch.zeros(2, 6, 4)
    torch.library.opcheck(moves.sum_over_ranks, (x, number))
    tests = ("test_schema", "test_faketensor")  # values are not defined: nothing is moved
    for operator in (moves.gather_parts, moves.sum_part_over_ranks):
        torch.library.opcheck(operator, (x, number, 2, 1), test_utils=tests)
        torch.library.opcheck(operator, (x.transpose(0, 1), number, 2, 0), test_utils=tests)
    torch.library.opcheck(moves.checked_tokens, (torch.arange(3), 3))


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
        moves.sum_over_ranks(torch.ones(3), torch.tensor(numbers[0]))


def test_a_part_of_a_sum_must_be_whole() -> None:
    with pytest.raises(UserError, match="a sequence of 5 is not divisible by 2"):
        RecordedMoves(torch.tensor(0), 2, 0).summed_part(torch.ones(2, 5), 1)
