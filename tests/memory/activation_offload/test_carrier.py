"""Which groups are stored, fetched and let go, and when."""

from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.collectives import Ledger
from echelon.collectives.boundary import PretendedBoundary
from echelon.memory.activation_offload import Carrier, HostPool
from echelon.memory.activation_offload.carrier import _begins
from echelon.memory.activation_offload.host_pool import piece_size
from echelon.memory.activation_offload.order import StepOrder
from echelon.memory.activation_offload.parcel import Mark, Parcel, Room, View
from echelon.memory.activation_offload.trip import Group, Trip

CPU = torch.device("cpu")


def carrier(going_back: dict[int, int] | None = None) -> Carrier:
    boundary = PretendedBoundary(Ledger())
    return Carrier(boundary, Ledger(), CPU, HostPool(boundary, lambda: None), going_back)


def test_where_parcels_lie_in_one_piece() -> None:
    assert _begins([]) == [0]
    assert _begins([1, 256, 257, 0]) == [0, 256, 512, 1024, 1024]


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


class Noted:
    """A trip, or a parcel, that notes what is asked of it."""

    def __init__(self, *, users: int = 1, stored: bool = False, num_bytes: int = 5000) -> None:
        self.calls: list[Any] = []
        self.num_users, self.is_stored, self.num_bytes = users, stored, num_bytes

    def end_group(self, *, stays: bool) -> None:
        self.calls.append(("end_group", stays))

    def begin_backward(self) -> None:
        self.calls.append("begin_backward")

    def set_aside(self) -> None:
        self.calls.append("set_aside")

    def store(self, room: Room, begin: int) -> None:
        self.calls.append(("store", len(room.piece), begin))

    def fetch(self) -> None:
        self.calls.append("fetch")

    def drop(self) -> None:
        self.calls.append("drop")


def test_each_trip_is_asked_by_its_stage_and_microbatch() -> None:
    each = carrier({2: 7})
    trips: dict[Any, Any] = {slot: Noted() for slot in ((2, 1), (1, 2))}
    each._trips.update(trips)
    for slot in ((2, 1), (1, 2), (5, 5)):
        each.store(slot)
        each.fetch(slot)
        each.set_aside(slot)
    assert trips[2, 1].calls == [("end_group", True), "begin_backward", "set_aside"]
    assert trips[1, 2].calls == [("end_group", False), "begin_backward", "set_aside"]
    each.forget()
    assert len(each._trips) == 0


def group_of(*parcels: Any) -> Group:
    group = Group(0)
    group.parcels = list(parcels)
    return group


def test_a_group_is_stored_in_one_piece_and_let_go_when_the_next_one_leaves() -> None:
    each = carrier()
    unused, stored = Noted(users=0), Noted(stored=True)
    first, second, third = Noted(num_bytes=5000), Noted(num_bytes=100), Noted()
    each.send(group_of(unused, first, stored, second))
    assert (first.calls, second.calls) == ([("store", 8192, 0)], [("store", 8192, 5120)])
    assert unused.calls == stored.calls == []
    each.send(group_of(third))
    assert (first.calls[1:], second.calls[1:], third.calls[1:]) == (["drop"], ["drop"], [])
    each.send(group_of(unused))
    assert len(each.pool.pieces) == 2, "nothing is to be stored"
    each.settle()
    assert third.calls[1:] == ["drop"]
    each.bring(group_of(unused, first))
    assert (unused.calls, first.calls[-1]) == ([], "fetch")


def test_host_memory_of_activations_is_accounted() -> None:
    each = carrier()
    each.pool.take(5000)
    (holder,) = [held for name, held in each.boundary._holders if name == "activations"]
    assert [len(piece) for piece in holder()] == [8192]


def test_a_pass_without_gradients_is_no_trip() -> None:
    each = carrier()
    with torch.no_grad(), each.passing((0, 0), []):
        assert each.trip is None
    with each.passing((0, 0), []):
        assert each.trip is not None
    assert each.trip is None


def test_what_the_stage_was_called_with_stays() -> None:
    each, given = carrier(), torch.randn(32, 32)
    with each.passing((0, 0), [given, torch.randn(3).to_sparse()]):
        trip = each.trip
        assert trip is not None
        assert not trip._travels(given)
        assert not trip._travels(given[1:]), "nor a view of it"
        assert trip._travels(torch.randn(32, 32))
    assert trip._travels(given), "afterwards nothing is known of it"


def a_trip(going_back: int | None = None) -> tuple[Trip, list[Any]]:
    """Of which the carrier notes what is sent and brought."""
    each, log = carrier(), list[Any]()
    each.send = lambda group: log.append(("send", group.number))  # type: ignore[method-assign]
    each.bring = lambda group: log.append(("bring", group.number))  # type: ignore[method-assign]
    each.settle = lambda **_: log.append("settle")  # type: ignore[method-assign, assignment]
    return Trip(each, set(), going_back), log


def test_a_group_ends_where_a_layer_returns() -> None:
    trip, log = a_trip(going_back=3)
    kept = []
    for _ in range(3):
        trip.enter_layer(set())
        kept.append(trip.pack(torch.randn(32, 32)))
        trip.leave_layer()
    assert log == [("send", 0), ("send", 1)], "the third is the last: its backward pass comes at once"
    trip.end_group(stays=False)
    assert len(log) == 2, "nothing was saved since"
    log.clear()
    trip.begin_backward()
    assert log == ["settle", ("bring", 2), ("bring", 1)]
    log.clear()
    for packed in reversed(kept):
        packed.take()
    assert log == ["settle", ("bring", 1), ("bring", 0), "settle", ("bring", 0)]
    log.clear()
    kept[1].take()
    assert log == [], "one behind is a straggler"
    kept[2].take()
    assert log == ["settle", ("bring", 2), ("bring", 1)], "two behind is another pass"
    trip.set_aside()
    log.clear()
    kept[0].take()
    assert log == ["settle", ("bring", 0)]


def test_a_trip_that_has_saved_nothing_fetches_nothing() -> None:
    trip, log = a_trip()
    trip.begin_backward()
    trip.end_group(stays=False)
    assert log == []


def test_arguments_of_a_layer_stay_while_it_runs() -> None:
    trip, _ = a_trip()
    mask = torch.randn(32, 32)
    trip.enter_layer({mask.untyped_storage()._cdata})
    assert not trip._travels(mask)
    trip.leave_layer()
    assert trip._travels(mask)


def parcel_of(tensor: Tensor) -> tuple[Parcel, PretendedBoundary, HostPool]:
    boundary = PretendedBoundary(Ledger())
    pool = HostPool(boundary, lambda: None)
    return Parcel(tensor, 0, boundary, StepOrder(CPU), None), boundary, pool


def test_the_way_of_a_parcel() -> None:
    tensor = torch.arange(2048, dtype=torch.uint8)
    parcel, _, pool = parcel_of(tensor)
    parcel.num_users = 2
    piece = pool.take(4096)
    assert piece is not None
    room = Room(pool, piece)
    assert (parcel.num_bytes, parcel.is_here, parcel.is_stored) == (2048, True, False)
    parcel.drop()
    assert parcel.is_here, "nobody else has it"
    mark = Mark(tensor)
    parcel.marks.append(mark)
    parcel.store(room, 512)
    assert (parcel.is_here, parcel.is_stored) == (True, True)
    parcel.drop()
    assert (parcel.is_here, parcel.marks, mark._tensor) == (False, [], None)
    assert torch.equal(piece[512 : 512 + 2048], tensor)
    assert torch.equal(parcel.value(), tensor)
    assert parcel.value().data_ptr() != tensor.data_ptr()
    parcel.drop()
    assert not parcel.is_here
    parcel.end_use()
    assert pool.take(4096) is not piece, "somebody may still ask"
    assert torch.equal(parcel.value(), tensor)
    parcel.end_use()
    assert (parcel.is_here, pool.take(4096) is piece) == (False, True)


def test_room_goes_back_when_all_parcels_are_gone() -> None:
    _, _, pool = parcel_of(torch.zeros(1))
    piece = pool.take(4096)
    assert piece is not None
    room = Room(pool, piece)
    room.enter()
    room.enter()
    room.leave()
    assert not any(pool._idle.values())
    room.leave()
    assert pool.take(4096) is piece


def test_a_mark_remembers_changes_before_the_copy() -> None:
    for changes_first in (False, True):
        tensor = torch.ones(2)
        mark = Mark(tensor)
        mark.check()
        if changes_first:
            tensor.add_(1)
        mark.finish()
        tensor.add_(1)
        if changes_first:
            with pytest.raises(Exception, match="was changed in place after the forward pass had saved it"):
                mark.check()
        else:
            mark.check()


def test_a_view_of_another_memory() -> None:
    base = torch.arange(24.0)
    view = base.view(4, 6)[1:, ::2].t()
    other = (base + 100).clone()
    taken = View.of(view).take(other)
    assert (taken.shape, taken.stride(), taken.storage_offset()) == (view.shape, view.stride(), 6)
    assert torch.equal(taken, view + 100)
