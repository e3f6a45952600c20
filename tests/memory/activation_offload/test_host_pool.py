"""Pieces of host memory that are used again."""

import pytest

from echelon.collectives import Ledger
from echelon.collectives.boundary import PretendedBoundary
from echelon.memory.activation_offload.offloaded_storage import HostPool, piece_size


@pytest.mark.parametrize(
    ("num_bytes", "size"),
    [
        (0, 4096),
        (1, 4096),
        (4096, 4096),
        (4097, 8192),
        (65536, 65536),
        (65537, 65536 + 8192),
        (2**20, 2**20),
        (2**20 + 1, 2**20 + 2**17),
        (2**20 + 2**17, 2**20 + 2**17),
        (2**20 + 2**17 + 1, 2**20 + 2**18),
    ],
)
def test_pieces_have_one_of_eight_sizes_for_each_power_of_two(num_bytes: int, size: int) -> None:
    assert piece_size(num_bytes) == size


def test_a_piece_serves_again_if_it_is_not_much_too_large() -> None:
    pool = HostPool(PretendedBoundary(Ledger()), lambda: None)
    large = pool.take(24 * 4096)
    small = pool.take(16 * 4096)
    assert (len(large), len(small), pool.num_bytes) == (24 * 4096, 16 * 4096, 40 * 4096)  # type: ignore[arg-type]
    pool.give_back(large)  # type: ignore[arg-type]
    assert pool.take(15 * 4096) is not large, "one and a half times as large, at most"
    assert pool.take(16 * 4096) is large
    pool.give_back(large)  # type: ignore[arg-type]
    pool.give_back(small)  # type: ignore[arg-type]
    assert pool.take(16 * 4096) is small, "the smallest that is large enough"
    assert pool.take(24 * 4096) is large
    assert len(pool.pieces) == 3


@pytest.mark.parametrize(("free", "is_there"), [(None, True), (8192, True), (8191, False), (-5, False)])
def test_what_the_host_has_left_is_enough_or_not(free: int | None, is_there: bool) -> None:
    pool = HostPool(PretendedBoundary(Ledger()), lambda: free)
    assert (pool.take(8192) is not None) is is_there
    assert (pool.refusal is None) is is_there
    if not is_there:
        assert pool.refusal is not None
        assert pool.refusal.endswith("the host has 8.0 KiB left" if free == 8191 else "the host has 0 B left")
        first = pool.refusal
        pool.take(10**6)
        assert pool.refusal == first, "the first time is told"
