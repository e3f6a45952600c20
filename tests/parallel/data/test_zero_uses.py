"""Weights that come and go, in one process: who may read them when, what stays, and what is told."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Group, Ledger, RecordingGroup
from echelon.collectives.boundary import PretendedBoundary
from echelon.errors import UserError
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.parameter_set import SharedGradient
from echelon.parallel.data.sharing import Problem
from echelon.parallel.data.zero.host_weights import HostPlace
from echelon.parallel.data.zero.weight_access import FreedParameter
from echelon.parallel.data.zero.zero import Zero
from tests.groups import DeferredGroup
from tests.sets import set_of
from tests.thread_ranks import run_threads

pytestmark = pytest.mark.usefixtures("packed")


def ones(layers: int = 3) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers)))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def sharded(model: nn.Module, level: int = 3, group: Group | None = None, **options: Any) -> Zero:
    sharing = Zero(set_of(model, group or DeferredGroup()), level, Wrapping(), **{"prefetch": 0, **options})
    sharing.start_step()
    return sharing


def gathered(sharing: Zero) -> list[int]:
    return [index for index, unit in enumerate(sharing._units) if any(flat.is_gathered for flat in unit)]


# Reads.


def test_a_weight_may_be_read_between_the_modules_of_a_pass_and_stays_for_the_backward_pass() -> None:
    model = ones()
    sharing = sharded(model)
    with pytest.raises(UserError, match=r"1\.weight has no values on this rank: with zero=3"):
        model[1].weight.sum()
    sharing.gather(backward=False)
    assert model[1].weight.sum().item() == 4
    assert model[1].weight.sum().item() == 4, "again"
    sharing.free()
    assert gathered(sharing) == [1]
    sharing.finish_backward()
    assert gathered(sharing) == [1], "until the step is over"
    sharing.reduce()
    sharing.publish()
    assert gathered(sharing) == []
    with pytest.raises(UserError):
        model[1].weight.sum()


def test_without_a_backward_pass_what_was_read_goes_with_the_pass() -> None:
    model = ones()
    sharing = sharded(model)
    with torch.no_grad():
        sharing.gather(backward=False)
        model[1].weight.sum()
        sharing.free()
    assert gathered(sharing) == []
    with pytest.raises(UserError):
        model[1].weight.sum()


def test_a_module_may_read_the_weight_of_another() -> None:
    class Reading(nn.Module):
        def __init__(self, other: nn.Linear) -> None:
            super().__init__()
            self.own = nn.Linear(2, 2, bias=False)
            self.other = [other]

        def forward(self, x: Tensor) -> Tensor:
            return self.own(x) @ self.other[0].weight

    model = ones()
    model.append(Reading(model[0]))
    sharing = sharded(model)
    model[3](torch.ones(1, 2))
    assert 0 in gathered(sharing)
    assert not sharing.residency.in_use


def test_an_abandoned_pass_leaves_nothing_in_use() -> None:
    model = ones()
    sharing = sharded(model)

    def fail(*_: object) -> None:
        raise ValueError

    model[1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError):  # noqa: PT011
        model[1](torch.ones(1, 2))
    sharing.gather(backward=False)
    sharing.residency.hold(2)
    sharing.abandon_pass()
    assert not sharing.residency.in_use
    assert sharing.residency._users == [0, 0, 0]
    sharing.residency.free_unused()
    assert gathered(sharing) == []
    with pytest.raises(UserError):
        model[2].weight.sum()


def test_a_module_that_returns_its_weight_keeps_it() -> None:
    class Giving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self) -> tuple[Tensor, Tensor]:
            return self.weight[0], torch.ones(2).to_sparse()

    model = nn.Sequential(Giving(), nn.Linear(2, 2, bias=False))
    sharing = sharded(model)
    row, _ = model[0]()
    assert gathered(sharing) == [0]
    assert row.tolist() == [1.0, 1.0]
    model[1](torch.ones(1, 2))
    assert gathered(sharing) == [0]


def test_held_units_are_counted_once_and_are_no_modules_that_run() -> None:
    sharing = sharded(ones())
    residency = sharing.residency
    for _ in range(2):
        residency.hold(1)
    assert (residency._users, residency.in_use) == ([0, 1, 0], False)
    residency.enter(1, backward=False)
    assert residency.in_use
    residency.leave(1)
    assert (gathered(sharing), residency.in_use) == ([1], False)
    residency.release()
    assert (gathered(sharing), residency._users) == ([], [0, 0, 0])
    residency.hold(1)
    assert residency._users == [0, 1, 0], "it is held again"
    residency.reset()
    assert residency._held == set()
    assert not sharded(ones()).residency.in_use


def test_a_backward_pass_through_a_backward_pass_is_refused() -> None:
    model = ones()
    sharing = sharded(model)
    total = model(torch.ones(1, 2, requires_grad=True)).sum()
    sharing.start_backward(last=True)
    with pytest.raises(UserError, match=r"with zero=3 weights are freed after the backward pass.*use zero=2"):
        total.backward(create_graph=True)


def test_a_second_run_has_its_weights_and_gives_them_back() -> None:
    model = ones()
    sharing = sharded(model)
    with sharing.second_run(model[1]):
        assert gathered(sharing) == [1]
        assert sharing.residency.in_use
        model[1](torch.ones(1, 2))
        assert gathered(sharing) == [1], "the inner use leaves it to the outer one"
    assert gathered(sharing) == []
    with sharing.second_run(nn.Linear(1, 1)):
        assert gathered(sharing) == []
    with pytest.raises(ValueError), sharing.second_run(model[1]):  # noqa: PT011
        raise ValueError
    assert gathered(sharing) == []
    whole = sharded(ones(), level=2)
    with whole.second_run(nn.Linear(1, 1)):
        pass


# Changes by a pass.


class Changing(nn.Linear):
    """Changes its weight in its forward."""

    through_data, in_place = False, False

    def forward(self, x: Tensor) -> Tensor:
        if self.through_data:
            self.weight.data.add_(1)
        if self.in_place:
            with torch.no_grad():
                self.weight.add_(1)
        return super().forward(x)


def with_changing() -> tuple[nn.Sequential, Changing]:
    model = ones()
    model[1] = Changing(2, 2, bias=False)
    return model, model[1]


def test_a_change_that_no_version_tells_of_is_found_before_the_first_update() -> None:
    for level in (2, 3):
        model, changing = with_changing()
        sharing = sharded(model, level)
        changing.through_data = True
        model(torch.ones(1, 2))
        if level == 3:
            with pytest.raises(UserError, match=r"^1\.weight: changed in place during a forward"):
                sharing.end_watch()
        sharing.end_watch()
        model(torch.ones(1, 2))
        sharing.end_watch()


def test_a_step_forgets_what_an_earlier_one_has_changed() -> None:
    model, changing = with_changing()
    sharing = sharded(model)
    changing.through_data = True
    model(torch.ones(1, 2))
    changing.through_data = False
    sharing.start_step()
    model(torch.ones(1, 2))
    sharing.end_watch()


def test_a_change_that_a_version_tells_of_is_refused_at_once() -> None:
    model, changing = with_changing()
    sharded(model)
    changing.in_place = True
    message = (
        r"1\.weight: changed in place during a forward or backward pass, and with zero=3 the change is lost"
    )
    with pytest.raises(UserError, match=message):
        model(torch.ones(1, 2))


def test_weights_that_lie_elsewhere_between_steps_are_taken_over() -> None:
    model = ones()
    sharing = sharded(model, level=2)
    model[0].weight.data = torch.full((2, 2), 5.0)
    model[1].weight.data = torch.full((2, 2), 6.0)
    sharing.take_over({model[0].weight})
    (first, second, _) = (local.tensor.tolist() for local in reversed(sharing.local_parameters()))
    assert first == [5.0, 5.0]
    assert second == [1.0, 1.0], "of which nobody has said so"
    assert model[0].weight.data_ptr() == sharing._units[0][0].flat.data_ptr()


def test_weights_that_stay_move_to_new_memory() -> None:
    model = ones()
    sharing = sharded(model, level=1)
    old = [parameter.data for parameter in model.parameters()]
    sharing.reallocate()
    assert all(p.data_ptr() != before.data_ptr() for p, before in zip(model.parameters(), old, strict=True))
    with pytest.raises(AssertionError):
        sharded(ones()).reallocate()


# What is held.


def test_what_is_whole_on_one_rank_or_on_all() -> None:
    assert [local.name for local in sharded(ones(), 1, RecordingGroup("data")).kept_whole()] == [
        "2.weight",
        "1.weight",
        "0.weight",
    ]
    assert sharded(ones(), 1).kept_whole() == []
    assert sharded(ones(), 3, RecordingGroup("data")).kept_whole() == []
    assert [name for name, _ in sharded(ones(), 2).resident_parameters()] == [
        "2.weight",
        "1.weight",
        "0.weight",
    ]
    assert sharded(ones(), 3).resident_parameters() == []
    assert sharded(ones(), 2, RecordingGroup("data")).resident_parameters() == []


@pytest.mark.parametrize("level", [1, 3])
def test_frozen_weights_and_such_without_elements_are_owned_whole_or_in_parts(level: int) -> None:
    model = ones(2)
    model[0].requires_grad_(False)
    model[1].empty = nn.Parameter(torch.empty(0, 3))
    sharing = sharded(model, level, DeferredGroup(rank=1))
    waited: list[str] = []
    sharing.expect_weights(lambda local: waited.extend(each.name for each in local))
    slices = {owned.slice.name: (owned.slice.offsets, owned.slice.sizes) for owned in sharing.owned()}
    assert slices == {
        "0.weight": ((0, 0), (2, 2)) if level == 1 else ((1, 0), (1, 2)),
        "1.weight": ((1, 0), (1, 2)),
        "1.empty": ((0, 0), (0, 3)),
    }
    assert waited == ["1.weight"]


def test_first_weights_reach_every_rank() -> None:
    for level in (1, 2, 3):

        def run(group: Group, level: int = level) -> list[float]:
            model = ones(2)
            sharing = sharded(model, level, group)
            for owned in sharing.first_weights():
                owned.tensor.fill_(group.rank + 2)
            sharing.share_first_weights()
            with torch.no_grad():
                sharing.gather(backward=False)
                values = [value for layer in model for value in layer.weight.flatten().tolist()]
                sharing.free()
            return values

        assert run_threads(2, run) == [[2.0, 2.0, 3.0, 3.0] * 2] * 2, level


def test_ranks_that_ran_different_modules_refuse_the_step() -> None:
    """From the second step on they compare what they gathered when it is over."""

    def run(group: Group) -> list[bool]:
        model = ones()
        sharing = sharded(model, group=group)
        found = []
        for step in range(2):
            sharing.start_step()
            first, second = (0, 1) if step == 0 or group.rank == 0 else (1, 0)
            for index in (first, second):
                model[index](torch.ones(1, 2)).detach()
            sharing.start_backward(last=True)
            sharing.finish_backward()
            sharing.reduce()
            found.append(bool(sharing.problems()[Problem.DIFFERENT_UNITS]))
            sharing.publish()
        return found

    assert run_threads(2, run) == [[False, True]] * 2
    assert sharded(ones(), 2).problems() == {}


def test_a_gradient_that_other_ranks_sum_too_waits_in_memory_of_its_own() -> None:
    model = ones(2)
    tie = SharedGradient(model[0].weight, RecordingGroup("tied"))
    parameters = set_of(model, DeferredGroup(), shared_gradients=[tie])
    sharing = Zero(parameters, 2, Wrapping(), in_backward=True)
    updated: list[str] = []
    sharing.update_in_backward(lambda unit: updated.extend(local.name for local in unit.local))
    sharing.start_step()
    total = model(torch.ones(1, 2)).sum()
    sharing.start_backward(last=True)
    total.backward()
    sharing.finish_backward()
    sharing.reduce()
    assert updated == ["1.weight"]
    gradients = {local.name: local.tensor.grad for local in sharing.local_parameters()}
    assert gradients["1.weight"] is None
    assert gradients["0.weight"] is not None
    assert gradients["0.weight"].tolist() == [4.0, 4.0]
    assert [[each.name for each in local] for local in sharing.pieces_to_update()] == [["0.weight"]]
    sharing.publish()
    assert sharing.local_parameters()[0].tensor.grad is None


def test_a_closed_engine_leaves_no_owner_and_no_memory_of_the_host() -> None:
    model = ones(2)
    boundary = PretendedBoundary(Ledger())
    sharing = sharded(model, 1, RecordingGroup("data"), host=HostPlace(boundary))
    assert [type(parameter) for parameter in model.parameters()] == [FreedParameter] * 2
    assert [tensor.numel() for tensor in boundary.storages()["parameters"]] == [4, 4]
    sharing.close()
    assert [tensor.numel() for tensor in boundary.storages()["parameters"]] == [0, 0]
    assert [flat._owner is sharing for flat in sharing._flats] == [False, False]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_unit_that_is_freed_while_its_shard_is_fetched_is_gathered_again() -> None:
    group, boundary = DeferredGroup(), PretendedBoundary(Ledger())
    sharing = sharded(ones(1), 3, group, host=HostPlace(boundary))
    (flat,) = sharing._flats
    flat.gather()
    flat.free()
    assert not flat.is_gathered
    assert group.subjects.count("parameters") == 0, "its messages have not begun"
    flat.synchronize()
    assert not group.pending
    flat.gather()
    flat.synchronize()
    assert flat.parameters[0][1].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_dropped_gradients_are_no_longer_the_parameters() -> None:
    model = ones(1)
    sharing = sharded(model, 2, RecordingGroup("data", 0, 2))
    (flat,) = sharing._flats
    model[0].weight.grad = torch.ones(2, 2)
    flat.gradient.accumulate(model[0].weight)
    flat.gradient.drop()
    assert model[0].weight.grad is None
    assert flat.gradient.buffer is None


def test_host_places_keep_what_fits_on_the_device() -> None:
    place = HostPlace(boundary := PretendedBoundary(Ledger()), 40)
    assert [place.boundary_for(size) for size in (16, 24, 0, 1, 0)] == [None, None, None, boundary, None]
    small = HostPlace(boundary, 40)
    assert [small.boundary_for(size) for size in (41, 1)] == [boundary, boundary]
    assert not place.updates
    assert HostPlace(boundary, updates=True).updates
    assert HostPlace(boundary).boundary_for(1) is boundary
