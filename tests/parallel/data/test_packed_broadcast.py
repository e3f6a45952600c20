"""Many tensors in few messages: their values are rank 0's, and no message is larger than the buffer."""

import pytest
import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.parallel.data import packed_broadcast
from echelon.parallel.data.packed_broadcast import broadcast_packed
from tests.thread_ranks import run_threads


def tensors(rank: int) -> list[Tensor]:
    """Of two types, one not contiguous, one without elements, one a number, one larger than the buffer."""
    base = 100.0 * rank
    return [
        torch.arange(3.0) + base,
        torch.arange(4, dtype=torch.int64) + 100 * rank,
        (torch.arange(6.0) + base).view(2, 3).t(),
        torch.empty(0),
        torch.tensor(base),
        torch.arange(40.0).view(5, 8) + base,
    ]


def test_everybody_has_rank_0_s_values_however_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(group: Group) -> list[int]:
        own = tensors(group.rank)
        strides = [tensor.stride() for tensor in own]
        broadcast_packed(own, group)
        assert all(map(torch.equal, own, tensors(0)))
        assert [tensor.stride() for tensor in own] == strides
        return [move.traffic.payload for move in group.ledger.moves]

    assert run_threads(2, run) == [[(3 + 6 + 1 + 40) * 4, 4 * 8]] * 2
    monkeypatch.setattr(packed_broadcast, "BYTES_AT_ONCE", 64)
    assert run_threads(2, run) == [[40, 64, 64, 32, 32]] * 2
    monkeypatch.setattr(packed_broadcast, "BYTES_AT_ONCE", 40)
    assert run_threads(2, run) == [[40, *[32] * 5, 32]] * 2, "exactly the limit is one message"


def test_a_tensor_with_more_than_a_buffer_in_a_row_is_cut_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_broadcast, "BYTES_AT_ONCE", 16)

    def sizes(*shape: int) -> list[list[int]]:
        tensor = torch.zeros(shape)
        return [[each.numel() for each in portion] for portion in packed_broadcast._portions([tensor])]

    assert sizes(2, 6) == [[4], [2], [4], [2]]
    assert sizes(1, 1, 5) == [[4], [1]]
    assert sizes(4) == [[4]]
    monkeypatch.setattr(packed_broadcast, "BYTES_AT_ONCE", 1)
    assert sizes(2, 1) == [[1], [1]], "one element, however large"


def test_the_buffer_is_32_mib() -> None:
    assert packed_broadcast.BYTES_AT_ONCE == 2**25
