"""Freed weights: what may be asked of them, and what makes them whole."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import RecordingGroup
from echelon.errors import UserError
from echelon.parallel.data.zero.flat import FlatUnit
from echelon.parallel.data.zero.freed import FreedParameter, mark_whole, register_owner
from echelon.parallel.data.zero.idle import Idle, IdleParameter
from tests.groups import DeferredGroup


class Weight(nn.Parameter):
    """A class of the user's."""


def freed_unit(parameter: nn.Parameter) -> FlatUnit:
    unit = FlatUnit("unit", [("layer.weight", parameter)], RecordingGroup("data", 0, 2), resident=False)
    unit.free()
    return unit


def test_shape_type_and_gradient_of_a_freed_weight_can_be_asked_for() -> None:
    parameter = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    unit = freed_unit(parameter)
    assert isinstance(parameter, FreedParameter)
    assert (parameter.shape, parameter.dim(), parameter.numel(), len(parameter)) == ((3, 4), 2, 12, 3)
    assert (parameter.dtype, parameter.device.type, parameter.is_leaf) == (torch.float64, "cpu", True)
    assert torch.zeros_like(parameter).tolist() == [[0.0] * 4] * 3
    parameter.grad = torch.ones(3, 4, dtype=torch.float64)
    parameter.requires_grad_(False)
    assert (parameter.grad.sum(), parameter.requires_grad) == (12, False)
    assert repr(parameter) == "Parameter containing:\nlayer.weight, freed, shape=(3, 4)"
    assert not unit.is_gathered


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p + 1,
        lambda p: nn.functional.linear(torch.ones(2, 4), p),
        lambda p: torch.cat([torch.ones(1, 4), p]),
        lambda p: p[0],
        lambda p: p.t(),
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p.tolist(),
        lambda p: p.copy_(torch.ones(3, 4)),
        copy.deepcopy,
        pickle.dumps,
    ],
)
def test_who_reads_a_freed_weight_is_told_its_name(read: object) -> None:
    parameter = nn.Parameter(torch.ones(3, 4))
    unit = freed_unit(parameter)
    with pytest.raises(UserError, match=r"layer.weight has no values on this rank.*engine.full_state_dict"):
        read(parameter)  # type: ignore[operator]
    del unit


def test_its_owner_may_gather_it_and_then_it_is_what_it_was() -> None:
    parameter = Weight(torch.arange(4.0))
    unit = FlatUnit("unit", [("w", parameter)], RecordingGroup("data", 0, 1), resident=False)
    unit.free()
    reads = []

    def gather(flat: FlatUnit) -> None:
        reads.append(flat)
        flat.gather()

    unit.on_read = gather
    assert torch.equal(parameter * 2, torch.tensor([0.0, 2.0, 4.0, 6.0]))
    assert (reads, type(parameter)) == ([unit], Weight)


def test_a_weight_on_its_way_is_waited_for() -> None:
    """Gathered ahead, it was memory that nobody had written to yet."""
    parameter, group = nn.Parameter(torch.ones(4)), DeferredGroup()
    unit = FlatUnit("unit", [("w", parameter)], group, resident=False)
    unit.free()
    unit.gather()
    assert group.pending
    assert parameter.sum() == 4
    assert not group.pending


def test_a_weight_whose_engine_is_gone_says_so() -> None:
    parameter = nn.Parameter(torch.ones(3))
    unit = freed_unit(parameter)
    del unit
    with pytest.raises(UserError, match=r"layer.weight has no values on this rank: its engine is gone"):
        parameter.sum()


def test_autograd_does_not_read_a_freed_weight_that_it_has_saved() -> None:
    """It read not-a-number, and through a view of the weight memory that was gone."""
    for operation in (lambda x, w: x * w, lambda x, w: x @ w.t()):
        parameter = nn.Parameter(torch.ones(3, 3), requires_grad=False)
        unit = FlatUnit("unit", [("w", parameter)], RecordingGroup("data", 0, 1), resident=False)
        x = torch.ones(3, 3, requires_grad=True)
        output = operation(x, parameter).sum()
        unit.free()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward(retain_graph=True)
        unit.gather()
        unit.synchronize()
        output.backward()
        assert _is_finite(x.grad)


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(tensor.isfinite().all())


def test_a_change_in_place_that_would_be_lost_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(3))
    unit = FlatUnit("unit", [("w", parameter)], RecordingGroup("data", 0, 1), resident=False)
    with torch.no_grad():
        parameter.mul_(2)
    with pytest.raises(UserError, match="w: changed in place during a forward"):
        unit.free()


class Owner:
    """Makes a weight whole for whoever reads it."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        register_owner(parameter, "w", self.read)
        parameter.__class__ = FreedParameter  # type: ignore[assignment]

    def read(self, _: str) -> None:
        mark_whole(self._parameter)


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_write_through_data_is_seen_between_steps_also_where_it_makes_the_weight_whole(
    is_idle: bool,
) -> None:
    idle, parameter = Idle(), nn.Parameter(torch.ones(2))
    idle.watch("w", parameter)
    if is_idle:
        idle.begin()
    owner = Owner(parameter)
    version = parameter._version
    parameter.data.add_(1)
    assert (parameter._version > version) is is_idle
    assert type(parameter) is (IdleParameter if is_idle else nn.Parameter)
    again = Owner(parameter)
    assert parameter.sum().tolist() == 4.0, "what is no `.data` is what torch makes of it"
    assert owner is not again
