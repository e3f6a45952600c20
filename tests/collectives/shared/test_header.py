"""A header says what a slot holds, and only its address may differ between ranks."""

import pytest
import torch

from echelon.collectives.shared.header import PACKED_HEADER, Header, OperationKind
from echelon.collectives.shared.tensor_memory import TensorMemory

FLOATS = TensorMemory.of(torch.zeros(4))
HEADER = Header.of(OperationKind.ALL_REDUCE, FLOATS, 7, op="sum")


def test_a_header_survives_packing() -> None:
    header = Header.of(OperationKind.BROADCAST, FLOATS, 3, source=2, readable=FLOATS)
    assert Header._make(PACKED_HEADER.unpack(PACKED_HEADER.pack(*header))) == header
    assert (header.payload, header.address) == (16, FLOATS.address)


def test_tensors_of_two_ranks_have_different_addresses() -> None:
    memories = [TensorMemory.of(torch.zeros(4)) for _ in range(2)]
    first, second = (Header.of(OperationKind.SEND, memory, 0, readable=memory) for memory in memories)
    assert first.address != second.address
    assert first.matches(second)


@pytest.mark.parametrize(
    "other",
    [
        Header.of(OperationKind.ALL_REDUCE, FLOATS, 8, op="sum"),
        Header.of(OperationKind.REDUCE_SCATTER, FLOATS, 7, op="sum"),
        Header.of(OperationKind.ALL_REDUCE, TensorMemory.of(torch.zeros(5)), 7, op="sum"),
        Header.of(OperationKind.ALL_REDUCE, TensorMemory.of(torch.zeros(4, dtype=torch.int32)), 7, op="sum"),
        Header.of(OperationKind.ALL_REDUCE, FLOATS, 7, op="max"),
        Header.of(OperationKind.ALL_REDUCE, FLOATS, 7, op="sum", source=0),
        Header.of(OperationKind.ALL_REDUCE, FLOATS, 7, op="sum", readable=FLOATS),
    ],
    ids=["number", "kind", "payload", "type", "reduction", "source", "direct"],
)
def test_every_other_difference_is_a_mismatch(other: Header) -> None:
    assert not HEADER.matches(other)


def test_a_header_prints_what_matters() -> None:
    assert str(HEADER) == "all_reduce of 16 bytes of float32, sum (number 7)"
    broadcast = Header.of(OperationKind.BROADCAST, FLOATS, 0, source=1, readable=FLOATS)
    assert str(broadcast) == "broadcast of 16 bytes of float32, from rank 1, read in place (number 0)"
