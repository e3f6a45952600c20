"""Freed weights: what may be asked of them, and what makes them whole."""

import copy
import pickle
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import RecordingGroup
from echelon.errors import UserError
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.zero.flat import FlatUnit, UnitOwner
from echelon.parallel.data.zero.weight_access import (
    FreedParameter,
    Idle,
    IdleParameter,
    LostGradient,
    NewWeights,
    PartParameter,
    ResidentWeights,
    end_idle,
    gradient_between_steps,
    idle_kind,
    is_idle,
    mark_whole,
    register_owner,
)
from echelon.state.ownership import LocalParameter
from tests.groups import DeferredGroup
from tests.sets import set_of


class Weight(nn.Parameter):
    """A class of the user's."""


def freed_unit(parameter: nn.Parameter) -> FlatUnit:
    unit = FlatUnit("unit", [("layer.weight", parameter)], RecordingGroup("data", 0, 2), sharded=True)
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
    reads = []

    class Owner(UnitOwner):
        def read_unit(self, unit: FlatUnit) -> None:
            reads.append(unit)
            unit.gather()

    unit = FlatUnit("unit", [("w", parameter)], RecordingGroup("data", 0, 1), sharded=True, owner=Owner())
    unit.free()
    assert torch.equal(parameter * 2, torch.tensor([0.0, 2.0, 4.0, 6.0]))
    assert (reads, type(parameter)) == ([unit], Weight)


def test_a_weight_on_its_way_is_waited_for() -> None:
    """Gathered ahead, it was memory that nobody had written to yet."""
    parameter, group = nn.Parameter(torch.ones(4)), DeferredGroup()
    unit = FlatUnit("unit", [("w", parameter)], group, sharded=True)
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
        unit = FlatUnit("unit", [("w", parameter)], RecordingGroup("data", 0, 1), sharded=True)
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
    unit = FlatUnit("unit", [("w", parameter)], RecordingGroup("data", 0, 1), sharded=True)
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


# Parameters between two steps: writes through `.data` are seen, and lost gradients say so.


def watched(lost: str | None = None) -> tuple[Idle, nn.Parameter]:
    idle, parameter = Idle(lost), nn.Parameter(torch.ones(2, 3))
    idle.watch("w", parameter)
    return idle, parameter


def test_a_write_through_data_is_seen_between_steps_and_not_during_one() -> None:
    idle, parameter = watched()
    assert not idle.is_idle
    assert not is_idle(parameter)
    parameter.data.clamp_(max=0.5)
    before = parameter._version
    idle.begin()
    assert is_idle(parameter)
    assert type(parameter) is IdleParameter
    parameter.data.clamp_(max=0.25)
    assert parameter._version > before
    parameter.data = torch.zeros(2, 3)
    assert torch.equal(parameter, torch.zeros(2, 3))
    idle.end()
    assert not is_idle(parameter)
    assert type(parameter) is nn.Parameter


def test_gradients_that_a_rank_has_whole_can_be_read_and_set() -> None:
    idle, parameter = watched()
    idle.begin()
    assert parameter.grad is None
    gradient = torch.ones(2, 3)
    parameter.grad = gradient
    assert parameter.grad is gradient
    idle.end()
    assert parameter.grad is gradient


def test_a_gradient_of_which_ranks_have_parts_may_be_dropped_and_not_used() -> None:
    idle, parameter = watched("use engine.clip")
    assert parameter.grad is None, "during a step it is what it is"
    idle.begin()
    lost = parameter.grad
    assert type(lost) is LostGradient
    assert (lost.shape, lost.dim(), lost.numel(), lost.dtype) == ((2, 3), 2, 6, torch.float32)
    with pytest.raises(UserError, match=r"the gradient of w: use engine\.clip"):
        lost.norm()
    with pytest.raises(UserError, match="the gradient of w"):
        torch.add(torch.ones(2, 3), other=lost)
    parameter.grad = None
    idle.end()
    assert parameter.grad is None


def test_a_frozen_parameter_has_no_gradient_to_lose() -> None:
    idle, parameter = watched("use engine.clip")
    parameter.requires_grad_(False)
    idle.begin()
    assert parameter.grad is None
    assert gradient_between_steps(nn.Parameter(torch.ones(1))) is None, "nobody watches it"


def test_a_copy_is_a_parameter_of_the_user_s() -> None:
    idle, parameter = watched()
    parameter.requires_grad_(False)
    idle.begin()
    model = nn.ParameterList([parameter, parameter])
    copied = copy.deepcopy(model)
    assert type(copied[0]) is nn.Parameter
    assert copied[0] is copied[1]
    assert not copied[0].requires_grad
    assert copied[0].data_ptr() != parameter.data_ptr()
    channels = nn.Parameter(torch.ones(1, 2, 2, 2).contiguous(memory_format=torch.channels_last))
    idle.watch("c", channels)
    idle.begin()
    assert copy.deepcopy(channels).stride() == channels.stride()


def test_parameters_of_other_kinds_stay_what_they_are() -> None:
    class Own(nn.Parameter):
        pass

    idle, own = Idle(), Own(torch.ones(1))
    idle.watch("own", own)
    idle.begin()
    assert type(own) is Own
    assert not is_idle(own)
    assert idle_kind(own, Own) is Own
    _, parameter = watched()
    assert idle_kind(parameter, nn.Parameter) is nn.Parameter


def test_what_is_shown_between_steps_is_idle() -> None:
    idle, parameter = watched()
    idle.begin()
    assert idle_kind(parameter, nn.Parameter) is IdleParameter
    assert idle_kind(parameter, IdleParameter) is IdleParameter
    end_idle([parameter, nn.Parameter(torch.ones(1))])
    assert type(parameter) is nn.Parameter


def test_an_engine_that_is_gone_is_not_idle() -> None:
    idle, parameter = watched("lost")
    idle.begin()
    del idle
    assert not is_idle(parameter)
    assert parameter.grad is None


def test_a_gradient_that_waits_is_not_replaced_and_another_may_be_dropped() -> None:
    idle, parameter = watched("lost")
    idle.begin()
    assert parameter.grad is not None
    parameter.grad.requires_grad_(False).zero_()
    assert type(parameter.grad.to(torch.float16)) is LostGradient, "lost in every type"
    parameter.grad = None
    idle.keeps_gradients = True
    for change in (lambda: setattr(parameter, "grad", None), lambda: parameter.grad.zero_()):
        with pytest.raises(UserError, match="the gradient of w: lost"):
            change()
    parameter.__class__ = FreedParameter  # type: ignore[assignment]
    with pytest.raises(UserError, match="the gradient of w: lost"):
        parameter.grad = None
    parameter.__class__ = IdleParameter  # type: ignore[assignment]
    idle.end()
    parameter.grad = torch.ones(2, 3)


def test_threads_of_the_engine_see_gradients_and_parts_as_they_are() -> None:
    idle, parameter = part()
    idle.lost_gradient = "lost"
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append((parameter.grad, parameter.sum().tolist())))
    thread.start()
    thread.join()
    assert seen == [(None, 6.0)]


def part() -> tuple[Idle, nn.Parameter]:
    idle, parameter = Idle(), nn.Parameter(torch.ones(3, 2))
    idle.watch("w", parameter, "a part")
    idle.begin()
    return idle, parameter


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p.norm(),
        lambda p: p.data,
        lambda p: p.numel(),
        lambda p: nn.init.zeros_(p),
        lambda p: torch.stack([p]),
        copy.deepcopy,
        pickle.dumps,
    ],
)
def test_values_of_a_part_are_refused_outside_of_modules(read: Callable[[nn.Parameter], object]) -> None:
    idle, parameter = part()
    assert type(parameter) is PartParameter
    with pytest.raises(UserError, match="w: a part"):
        read(parameter)
    assert parameter.shape == (3, 2)
    idle.end()
    read(parameter)


def test_modules_compute_with_parts_forward_and_back_and_may_be_converted() -> None:
    _idle, parameter = part()
    linear = nn.Linear(2, 3, bias=False)
    linear.weight = parameter
    linear(torch.ones(1, 2)).sum().backward()
    linear.cpu()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.ones(3, 2))
    end_idle([parameter])
    assert type(parameter) is nn.Parameter
    assert idle_kind(parameter, nn.Parameter) is PartParameter, "the engine is between steps"


# New weights on their way: whoever uses one first waits for it.


class Waiting:
    """The weights of a model of two layers, and what was waited for."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        self.model[1].empty = nn.Parameter(torch.empty(0))
        self.local = [LocalParameter(name, p, p) for name, p in self.model.named_parameters()]
        self.waited: list[str] = []
        self.wrapping = Wrapping()
        parameters = set_of(self.model, RecordingGroup("data"))
        self.weights = NewWeights(parameters, self.local, self.wait, self.wrapping)

    def wait(self, local: Sequence[LocalParameter]) -> None:
        self.waited += [each.name for each in local]
        self.weights.arrive(local)

    def kinds(self) -> list[type]:
        return [type(parameter) for parameter in self.model.parameters()]


def test_a_module_waits_for_the_weights_of_its_unit() -> None:
    waiting = Waiting()
    waiting.weights.expect(waiting.local)
    assert waiting.kinds() == [FreedParameter, FreedParameter, nn.Parameter], "nothing to wait for is there"
    waiting.model[1](torch.ones(1, 2))
    assert waiting.waited == ["1.weight", "1.empty"]
    assert waiting.kinds() == [FreedParameter, nn.Parameter, nn.Parameter]
    waiting.model(torch.ones(1, 2))
    assert waiting.waited[2:] == ["0.weight", "1.weight", "1.empty"]


def test_whoever_reads_a_weight_waits_for_that_one() -> None:
    waiting = Waiting()
    waiting.weights.hide()
    assert waiting.model[0].weight.detach().shape == (2, 2)
    assert waiting.waited == ["0.weight"]
    assert waiting.kinds()[:2] == [nn.Parameter, FreedParameter]


def test_weights_of_other_sets_stay_as_they_are() -> None:
    waiting = Waiting()
    other = nn.Parameter(torch.ones(1))
    waiting.weights.expect([LocalParameter("other", other, other)])
    assert type(other) is nn.Parameter
    waiting.weights.arrive([LocalParameter("other", other, other)])
    waiting.wrapping.remove()
    waiting.model(torch.ones(1, 2))
    assert waiting.waited == []


def test_resident_weights_ask_before_they_are_read() -> None:
    one, empty = nn.Parameter(torch.ones(2)), nn.Parameter(torch.empty(0))

    def refuse() -> None:
        raise UserError("closed")

    resident = ResidentWeights([("one", one), ("empty", empty)], refuse)
    assert one.tolist() == [1.0, 1.0]
    resident.hide()
    assert (type(one), type(empty)) == (FreedParameter, nn.Parameter)
    with pytest.raises(UserError, match="closed"):
        one.sum()
