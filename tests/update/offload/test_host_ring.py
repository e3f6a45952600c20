"""Pieces of one memory come back in the order in which they were taken."""

import threading

import pytest
import torch

from echelon.collectives import Ledger, make_boundary
from echelon.update.offload.host_ring import HostRing


def ring(size: int) -> HostRing:
    return HostRing(make_boundary(torch.device("cpu"), Ledger()), size)


def place(ring: HostRing, piece: torch.Tensor) -> tuple[int, int]:
    begin = int(piece.storage_offset())
    return begin, begin + len(piece)


def test_pieces_go_around() -> None:
    memory = ring(10)
    assert place(memory, memory.take(4)) == (0, 4)
    assert place(memory, memory.take(4)) == (4, 8)
    memory.give_back()
    assert place(memory, memory.take(3)) == (0, 3)
    memory.give_back()
    assert place(memory, memory.take(5)) == (3, 8)


def test_who_finds_no_room_waits() -> None:
    memory = ring(10)
    memory.take(6)
    memory.take(3)
    taken: list[tuple[int, int]] = []
    other = threading.Thread(target=lambda: taken.append(place(memory, memory.take(5))))
    other.start()
    other.join(0.05)
    assert other.is_alive()
    memory.give_back()
    other.join(10)
    assert taken == [(0, 5)]


def test_nobody_waits_after_the_end() -> None:
    memory = ring(10)
    memory.take(10)
    memory.abandon()
    assert len(memory.take(4)) == 4


def test_what_does_not_fit_behind_goes_to_the_begin_if_that_is_free() -> None:
    memory = ring(10)
    assert place(memory, memory.take(6)) == (0, 6)
    assert place(memory, memory.take(4)) == (6, 10), "to the last byte"
    memory.give_back()
    assert memory._find(6) is None, "a full ring would look like an empty one"
    assert memory._find(5) == 0
    assert place(memory, memory.take(2)) == (0, 2)
    assert (memory._find(4), memory._find(3)) == (None, 2)
    memory.give_back()
    assert place(memory, memory.take(8)) == (2, 10), "one piece is left, at the begin"
    memory.give_back()
    memory.give_back()
    assert place(memory, memory.take(10)) == (0, 10)


def test_more_than_all_of_it_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        ring(10).take(11)
    assert [len(each) for each in ring(10).storages()] == [10]
