"""Memory without autograd: aliases keep it alive, and reductions are taken in rank order."""

import ctypes
import mmap
import os

import pytest
import torch

from echelon.collectives.shared.tensor_memory import (
    TensorMemory,
    flat_alias,
    let_siblings_read,
    pieces,
    read_memory,
    reduce_in_rank_order,
    view_like,
)


def test_pieces_cover_the_memory() -> None:
    memory = TensorMemory.of(torch.arange(10, dtype=torch.uint8))
    assert memory.pieces(10) == [memory]
    assert [(piece.address - memory.address, piece.length) for piece in memory.pieces(4)] == [
        (0, 4),
        (4, 4),
        (8, 2),
    ]
    assert [len(piece) for piece in pieces(torch.zeros(10), 4)] == [4, 4, 2]


def test_copies_go_both_ways() -> None:
    source, destination = torch.arange(4.0), torch.zeros(4)
    TensorMemory.of(source).copy_to(destination.data_ptr())
    assert destination.tolist() == [0.0, 1.0, 2.0, 3.0]
    source.fill_(7)
    TensorMemory.of(destination).copy_from(source.data_ptr())
    assert destination.tolist() == [7.0] * 4


def test_an_alias_writes_without_a_version_and_outlives_the_tensor() -> None:
    tensor = torch.zeros(2, 3, requires_grad=True)
    version = tensor._version
    alias = flat_alias(tensor)
    alias.fill_(4)
    assert (alias.shape, alias.requires_grad, tensor._version) == ((6,), False, version)
    assert tensor[1, 2].item() == 4
    tensor.data = torch.empty(0)  # gives up the memory
    others = [torch.full((6,), -1.0) for _ in range(8)]  # would get it
    assert alias.tolist() == [4.0] * 6
    assert all(other.tolist() == [-1.0] * 6 for other in others)


def test_an_alias_of_an_inference_tensor_can_be_written_outside() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
        alias = flat_alias(tensor)
    alias.add_(1)
    assert tensor.tolist() == [1.0] * 3


@pytest.mark.parametrize("view", [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2)._neg_view()])
def test_views_whose_values_are_not_in_memory_are_refused(view: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"call .resolve_conj\(\) or .resolve_neg\(\) first"):
        TensorMemory.of(view)


def test_a_buffer_is_viewed_in_another_type() -> None:
    buffer, like = torch.zeros(64, dtype=torch.uint8), torch.zeros(3)
    view = view_like(buffer, like, start=2)
    view.fill_(1.5)
    assert buffer.view(torch.float32).tolist()[:6] == [0.0, 0.0, 1.5, 1.5, 1.5, 0.0]


@pytest.mark.parametrize("own_rank", range(3))
@pytest.mark.parametrize(("op", "value"), [("sum", 14.0), ("mean", 14.0 / 3), ("min", 2.0), ("max", 7.0)])
def test_the_output_may_be_a_part_that_is_not_yet_added(op: str, value: float, own_rank: int) -> None:
    parts = [torch.full((4,), number) for number in (5.0, 2.0, 7.0)]
    first, second = torch.zeros(2, 64, dtype=torch.uint8)
    order: list[int] = []

    def fetch(rank: int, buffer: torch.Tensor) -> torch.Tensor:
        order.append(rank)
        return parts[rank] if rank == own_rank else buffer.copy_(parts[rank])

    reduce_in_rank_order(fetch, 3, parts[own_rank], op, (first, second))  # type: ignore[arg-type]
    assert parts[own_rank].tolist() == pytest.approx([value] * 4)
    assert order == [0, 1, 2]


def test_bytes_of_this_process_can_be_read() -> None:
    source = ctypes.create_string_buffer(bytes(range(100)), 100)
    destination = ctypes.create_string_buffer(100)
    let_siblings_read()
    read_memory(os.getpid(), ctypes.addressof(source) + 10, ctypes.addressof(destination), 50)
    assert destination.raw == bytes(range(10, 60)) + bytes(50)


def test_memory_that_is_not_readable_is_an_error() -> None:
    """Also where only its second half is not: a part that was read does not count."""
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    destination = ctypes.create_string_buffer(2 * mmap.PAGESIZE)
    read_memory(os.getpid(), address, ctypes.addressof(destination), mmap.PAGESIZE)
    with pytest.raises(OSError, match="Bad address"):
        read_memory(os.getpid(), address, ctypes.addressof(destination), 2 * mmap.PAGESIZE)


def test_a_process_that_ended_is_an_error() -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    buffer = ctypes.create_string_buffer(8)
    with pytest.raises(ProcessLookupError):
        read_memory(child, ctypes.addressof(buffer), ctypes.addressof(buffer), 8)
