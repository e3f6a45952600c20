"""A recorder counts what a real group counts, and moves nothing."""

from collections.abc import Callable

import torch

from echelon.collectives import RecordingGroup, ring_all_reduce
from echelon.launching import Ranks
from tests.collectives.test_group import entries, one_of_each

Warm = Callable[[int], Ranks]


def test_a_recorder_counts_what_the_real_group_counts(warm_ranks: Warm) -> None:
    assert warm_ranks(4).run(entries) == [one_of_each(RecordingGroup("data", rank, 4)) for rank in range(4)]


def test_a_recorder_can_be_any_rank_of_thousands() -> None:
    group = RecordingGroup("data", rank=4095, size=4096)
    buffer = torch.ones(4096 * 2)
    group.all_reduce(buffer)
    assert group.ledger.total().sent == 2 * 4095 * 8
    assert torch.equal(buffer, torch.ones(4096 * 2))
    gathered = torch.zeros(4096)
    group.all_gather(gathered, torch.full((1,), 7.0))
    assert gathered[4095] == 7
    ring_all_reduce(RecordingGroup("data", 3, 5), torch.ones(7))


def test_a_recorder_needs_no_memory_for_what_it_pretends() -> None:
    group = RecordingGroup("data", rank=0, size=1024)
    group.all_reduce(torch.empty(10**12, device="meta"))
    assert group.ledger.total().payload == 4 * 10**12


def test_a_group_of_one_moves_nothing_and_enters_nothing() -> None:
    group = RecordingGroup("data")
    tensor, output = torch.arange(4.0), torch.zeros(4)
    group.all_reduce(tensor)
    group.all_gather(output, tensor)
    assert torch.equal(output, tensor)
    assert group.ledger.rows() == []
