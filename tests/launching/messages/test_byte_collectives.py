from collections.abc import Callable

import pytest

from echelon.launching import Ranks
from tests.launching import tasks

LENGTHS = [[0, 3, 6], [1024, 1025, 0], [5000, 1, 1024], [0, 0, 0]]


def expected(lengths: list[int]) -> list[bytes]:
    return [tasks.bytes_of(rank, length) for rank, length in enumerate(lengths)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_bytes_of_different_length_are_gathered_everywhere(
    lengths: list[int], warm_ranks: Callable[[int], Ranks]
) -> None:
    assert warm_ranks(3).run(tasks.all_gather, lengths) == [expected(lengths)] * 3


@pytest.mark.parametrize("chunk", [1000, 100_000])
def test_bytes_go_to_rank_0_and_from_there(chunk: int, warm_ranks: Callable[[int], Ranks]) -> None:
    lengths = [5000, 1, 2500]
    results = warm_ranks(3).run(tasks.gather_and_broadcast, lengths, chunk)
    assert [gathered for gathered, _ in results] == [expected(lengths), [], []]
    assert [first for _, first in results] == [expected(lengths)[0]] * 3
