"""The ring moves its share and no more; the naive way loads one rank."""

from collections.abc import Callable

import pytest
import torch

from echelon.collectives import RecordingGroup, naive_all_reduce, ring_all_reduce
from echelon.launching import Ranks
from tests.collectives.test_torch_group import world

Warm = Callable[[int], Ranks]


def ring_traffic(length: int, naive: bool) -> tuple[int, int, int]:
    group = world()
    tensor = torch.ones(length)
    (naive_all_reduce if naive else ring_all_reduce)(group, tensor)
    assert torch.equal(tensor, torch.full((length,), float(group.size)))
    total = group.ledger.total("data")
    return total.sent // 4, total.received // 4, total.count


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_ring_moves_its_share_and_no_more(warm_ranks: Warm, size: int) -> None:
    n = 24 * size
    for sent, received, _ in warm_ranks(size).run(ring_traffic, n, False):
        assert sent == received == 2 * (size - 1) * n // size


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_ring_of_uneven_chunks_shows_exactly_the_chunks_passed_on(warm_ranks: Warm, size: int) -> None:
    for n in (0, 1, size - 1, size + 1, 10 * size - 1):
        chunks = [n // size + (index < n % size) for index in range(size)]
        for rank, (sent, received, count) in enumerate(warm_ranks(size).run(ring_traffic, n, False)):
            # Rank r passes on every chunk but r+1, then every chunk but r+2; its left neighbour likewise.
            assert sent == 2 * n - chunks[(rank + 1) % size] - chunks[(rank + 2) % size]
            left = (rank - 1) % size
            assert received == 2 * n - chunks[(left + 1) % size] - chunks[(left + 2) % size]
            assert n > 0 or count == 0


def test_the_naive_one_loads_one_rank(warm_ranks: Warm) -> None:
    hub, *others = warm_ranks(4).run(ring_traffic, 1000, True)
    assert hub == (3000, 3000, 6)
    assert others == [(1000, 1000, 2)] * 3


def test_a_ring_can_be_recorded() -> None:
    group = RecordingGroup("data", 3, 5)
    ring_all_reduce(group, torch.ones(10))
    assert group.ledger.total("data").sent == 2 * 4 * 2 * 4
