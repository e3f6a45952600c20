"""Twins of local parameters, updated on the host."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Ledger
from echelon.collectives.boundary import PretendedBoundary
from echelon.state.ownership import LocalParameter
from echelon.update.offload.host_twins import HostTwins, Twin
from echelon.update.precision.rounding import KeyedRounding


def test_a_rank_that_holds_nothing_of_a_unit_calls_its_optimizer_too() -> None:
    """Optimizers whose ranks add up sums would wait for it."""
    twins = HostTwins([], PretendedBoundary(Ledger()), masters=False, rounding=KeyedRounding(7))
    calls: list[str] = []
    twins.update([], [], lambda: calls.append("call"), 0)
    assert calls == ["call"]


class HostRun:
    """A weight in host memory."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def join(self) -> None:
        """Nothing is under way."""


def local(values: Tensor) -> LocalParameter:
    parameter = nn.Parameter(values)
    return LocalParameter("w", parameter, parameter)


def twins_of(*each: LocalParameter, **options: Any) -> HostTwins:
    return HostTwins(list(each), PretendedBoundary(Ledger()), **{"masters": False, **options})


def test_twins_take_no_memory_before_the_first_update() -> None:
    twins = twins_of(local(torch.ones(100, 3)))
    (twin,) = twins.all
    assert (twin.weights.shape, twin.weights.untyped_storage().nbytes()) == ((100, 3), 4)
    assert (twins.has_memory, twins.parameter_storages(), twins.master_storages()) == (False, [], [])
    twins.allocate()
    assert twins.has_memory
    assert twin.updated.data_ptr() == twin.weights.data_ptr(), "of one type they are the same memory"
    assert len(twins.parameter_storages()) == 1
    assert twins.of(twin.local) is twin


def test_memory_has_the_strides_of_the_weights_and_each_type_its_own() -> None:
    turned, low = local(torch.ones(3, 5).t()), local(torch.ones(7).bfloat16())
    twins = twins_of(turned, low)
    twins.allocate()
    assert twins.of(turned).weights.stride() == turned.tensor.stride()
    assert [each.dtype for each in twins.parameter_storages()] == [torch.float32, torch.bfloat16]


def test_masters_are_float32_and_rounded_after_each_update() -> None:
    low = local(torch.tensor([1.0, 2.0]).bfloat16())
    twins = twins_of(low, masters=True)
    twins.allocate()
    (twin,) = twins.all
    twin.weights.copy_(low.tensor.detach())
    twins.load([twin])
    assert (twin.updated.dtype, twin.updated.tolist()) == (torch.float32, [1.0, 2.0])
    seen: list[Any] = []

    def update() -> None:
        assert twin.updated.grad is not None
        seen.append((twin.updated.grad.dtype, twin.updated.grad.tolist()))
        with torch.no_grad():
            twin.updated.add_(1e-3)

    twins.update([twin], [torch.tensor([3.0, 4.0]).bfloat16()], update, 0)
    assert seen == [(torch.float32, [3.0, 4.0])]
    assert twin.updated.tolist() == pytest.approx([1.001, 2.001])
    assert twin.weights.tolist() == [1.0, 2.0], "a thousandth is below what bf16 holds"
    assert twin.updated.grad is None
    with torch.no_grad():
        twin.weights[0] = 5.0
    twins.follow([twin])
    assert twin.updated.tolist() == pytest.approx([5.0, 2.001]), "only what the user has changed"
    assert len(twins.master_storages()) == 2, "masters, and float32 gradients"


def test_gradients_go_also_when_an_update_fails() -> None:
    twins = twins_of(local(torch.ones(2)))
    twins.allocate()
    (twin,) = twins.all

    def fail() -> None:
        raise ValueError("a bad rate")

    with pytest.raises(ValueError, match="a bad rate"):
        twins.update([twin], [torch.ones(2)], fail, 0)
    assert twin.updated.grad is None


def test_weights_that_stand_on_the_host_are_updated_where_they_are() -> None:
    each, memory = local(torch.ones(2)), torch.tensor([7.0, 8.0])
    for in_place in (True, False):
        twins = twins_of(each, host_runs={each.tensor: HostRun(memory)}, in_place=in_place)
        twins.allocate()
        (twin,) = twins.all
        assert (twin.weights.data_ptr() == memory.data_ptr()) is in_place
        twins.load([twin])
        assert twin.weights.tolist() == [7.0, 8.0]
        assert not twin.is_watched
        assert twins.parameter_storages()[0].numel() == (
            0 if in_place else twins.parameter_storages()[0].numel()
        )


def test_a_change_by_hand_is_seen() -> None:
    each = local(torch.ones(2))
    twins = twins_of(each)
    (twin,) = twins.all
    assert (twin.is_watched, twin.current_version(), twin.is_changed) == (False, (0, 0), False)
    twins.allocate()
    assert (twin.is_watched, twin.is_changed) == (True, False), "it has no values yet"
    twin.version = twin.current_version()
    assert not twin.is_changed
    with torch.no_grad():
        each.parameter.add_(1)
    assert twin.is_changed
    twin.version = twin.current_version()
    each.parameter.data = torch.zeros(2)
    assert twin.is_changed, "other memory"
    twin.version = twin.current_version()
    twin.forget_version()
    assert twin.is_changed
    fresh = Twin(each, each.parameter, each.tensor, is_watched=True)
    fresh.forget_version()
    assert (fresh.version, fresh.is_changed, fresh.host_run) == (None, False, None)


def test_a_part_in_memory_of_its_own_is_not_watched() -> None:
    whole = nn.Parameter(torch.ones(4))
    twins = twins_of(LocalParameter("w", whole, nn.Parameter(torch.ones(2))))
    twins.allocate()
    assert not twins.all[0].is_watched


@pytest.mark.parametrize(
    ("kind", "moments"), [("SGD", 1), ("Adam", 2), ("Adafactor", 0), ("SM3", 1), ("Muon", 1), ("RMSprop", 1)]
)
def test_what_the_host_must_hold(kind: str, moments: int) -> None:
    optimizer: Any = type(kind, (), {})()
    each, other = local(torch.ones(10).bfloat16()), local(torch.ones(6).bfloat16())
    plain, masters = twins_of(each, other), twins_of(each, other, masters=True)
    assert plain.num_bytes(optimizer) == 32 + moments * 32
    assert masters.num_bytes(optimizer) == 32 + 64 + moments * 64
    rounding = twins_of(each, other, rounding=KeyedRounding(7))
    assert rounding.num_bytes(optimizer) == 32 + moments * 64
    on_host = twins_of(each, other, host_runs={each.tensor: HostRun(torch.ones(10))})
    assert on_host.num_bytes(optimizer) == 12 + moments * 32
    combined: Any = type("Combined", (), {"optimizers": [optimizer, type("Adam", (), {})()]})()
    assert plain.num_bytes(combined) == 32 + 2 * 32, "the most that one of them has"
