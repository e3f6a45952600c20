"""Which groups are stored, fetched and released, and when."""

from typing import Any

import torch

from echelon.collectives import Ledger
from echelon.collectives.boundary import PretendedBoundary
from echelon.memory.activation_offload.offload import ActivationOffload, LayerGroup, OffloadedPass
from echelon.memory.activation_offload.offloaded_storage import HostPool, SharedPiece
from echelon.parallel.observer import BackwardPass, ForwardPass

CPU = torch.device("cpu")


def make_offload(immediate: dict[int, int] | None = None) -> ActivationOffload:
    boundary = PretendedBoundary(Ledger())
    return ActivationOffload(boundary, Ledger(), CPU, HostPool(boundary, lambda: None), immediate)


class Noted:
    """A pass, or a storage, that notes what is asked of it."""

    def __init__(self, *, users: int = 1, stored: bool = False, num_bytes: int = 5000) -> None:
        self.calls: list[Any] = []
        self.num_users, self.is_stored, self.num_bytes = users, stored, num_bytes

    def end_group(self, *, stays: bool) -> None:
        self.calls.append(("end_group", stays))

    def begin_backward(self) -> None:
        self.calls.append("begin_backward")

    def pause_backward(self) -> None:
        self.calls.append("pause_backward")

    def store(self, piece: SharedPiece, begin: int) -> None:
        self.calls.append(("store", len(piece.piece), begin))

    def fetch(self) -> None:
        self.calls.append("fetch")

    def drop(self) -> None:
        self.calls.append("drop")


def test_each_pass_is_asked_by_its_stage_and_microbatch() -> None:
    each = make_offload({2: 7})
    passes: dict[Any, Any] = {slot: Noted() for slot in ((2, 1), (1, 2))}
    each._passes.update(passes)
    for slot in ((2, 1), (1, 2), (5, 5)):
        each.store(slot)
        each.fetch(slot)
        each.after_backward(BackwardPass(slot, "weights", has_work=True))  # nothing comes after it
        each.after_backward(BackwardPass(slot, "inputs", has_work=False))
        each.after_backward(BackwardPass(slot, "inputs", has_work=True))
    assert passes[2, 1].calls == [("end_group", True), "begin_backward", "pause_backward"]
    assert passes[1, 2].calls == [("end_group", False), "begin_backward", "pause_backward"]
    each.abandon()
    assert len(each._passes) == 0


def group_of(*storages: Any) -> LayerGroup:
    group = LayerGroup(0)
    group.storages = list(storages)
    return group


def test_a_group_is_stored_in_one_piece_and_released_when_the_next_one_leaves() -> None:
    each = make_offload()
    unused, stored = Noted(users=0), Noted(stored=True)
    first, second, third = Noted(num_bytes=5000), Noted(num_bytes=100), Noted()
    each.store_group(group_of(unused, first, stored, second))
    assert (first.calls, second.calls) == ([("store", 8192, 0)], [("store", 8192, 5120)])
    assert unused.calls == stored.calls == []
    each.store_group(group_of(third))
    assert (first.calls[1:], second.calls[1:], third.calls[1:]) == (["drop"], ["drop"], [])
    each.store_group(group_of(unused))
    assert len(each.pool.pieces) == 2, "nothing is to be stored"
    each.release_stored()
    assert third.calls[1:] == ["drop"]
    each.fetch_group(group_of(unused, first))
    assert (unused.calls, first.calls[-1]) == ([], "fetch")


def test_storages_of_a_group_are_aligned_in_their_piece() -> None:
    each = make_offload()
    storages = [Noted(num_bytes=size) for size in (1, 256, 257, 0)]
    each.store_group(group_of(*storages))
    assert [call for storage in storages for call in storage.calls] == [
        ("store", 4096, begin) for begin in (0, 256, 512, 1024)
    ]


def test_host_memory_of_activations_is_accounted() -> None:
    each = make_offload()
    each.pool.take(5000)
    (holder,) = [held for name, held in each.boundary._holders if name == "activations"]
    assert [len(piece) for piece in holder()] == [8192]


def test_a_pass_without_gradients_is_not_recorded() -> None:
    each = make_offload()
    forward = ForwardPass((0, 0), None, None, None, 1, trains=True)
    with torch.no_grad():
        assert each.around_pass(forward) is None
    with each.passing((0, 0), []):
        assert each.current is not None
    assert each.current is None


def test_what_the_stage_was_called_with_stays() -> None:
    each, given = make_offload(), torch.randn(32, 32)
    with each.passing((0, 0), [given, torch.randn(3).to_sparse()]):
        current = each.current
        assert current is not None
        assert not current._is_offloaded(given)
        assert not current._is_offloaded(given[1:]), "nor a view of it"
        assert current._is_offloaded(torch.randn(32, 32))
    assert current._is_offloaded(given), "afterwards nothing is known of it"


def a_pass(immediate: int | None = None) -> tuple[OffloadedPass, list[Any]]:
    """Of which the offload notes what is stored and fetched."""
    each, log = make_offload(), list[Any]()
    each.store_group = lambda group: log.append(("store", group.number))  # type: ignore[method-assign]
    each.fetch_group = lambda group: log.append(("fetch", group.number))  # type: ignore[method-assign]
    each.release_stored = lambda **_: log.append("release")  # type: ignore[method-assign, assignment]
    return OffloadedPass(each, set(), immediate), log


def test_a_group_ends_where_a_layer_returns() -> None:
    current, log = a_pass(immediate=3)
    kept = []
    for _ in range(3):
        current.enter_layer(set())
        kept.append(current.pack(torch.randn(32, 32)))
        current.leave_layer()
    assert log == [("store", 0), ("store", 1)], "the third is the last: its backward pass comes at once"
    current.end_group(stays=False)
    assert len(log) == 2, "nothing was saved since"
    log.clear()
    current.begin_backward()
    assert log == ["release", ("fetch", 2), ("fetch", 1)]
    log.clear()
    for packed in reversed(kept):
        packed.take()
    assert log == ["release", ("fetch", 1), ("fetch", 0), "release", ("fetch", 0)]
    log.clear()
    kept[1].take()
    assert log == [], "one behind is a straggler"
    kept[2].take()
    assert log == ["release", ("fetch", 2), ("fetch", 1)], "two behind is another pass"
    current.pause_backward()
    log.clear()
    kept[0].take()
    assert log == ["release", ("fetch", 0)]


def test_a_pass_that_has_saved_nothing_fetches_nothing() -> None:
    current, log = a_pass()
    current.begin_backward()
    current.end_group(stays=False)
    assert log == []


def test_arguments_of_a_layer_stay_while_it_runs() -> None:
    current, _ = a_pass()
    mask = torch.randn(32, 32)
    current.enter_layer({mask.untyped_storage()._cdata})
    assert not current._is_offloaded(mask)
    current.leave_layer()
    assert current._is_offloaded(mask)
