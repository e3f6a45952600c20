"""Weights that stand in host memory: there while they are used, and never read before they are."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Group, Ledger, RecordingGroup
from echelon.collectives.boundary import PretendedBoundary
from echelon.engine import parallelize
from echelon.errors import UserError
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.zero.flat import FlatUnit
from echelon.parallel.data.zero.host_weights import HostPlace, HostRun, HostUnit, HostWeights
from echelon.parallel.data.zero.zero import Zero
from echelon.state.ownership import LocalParameter
from tests.cases import adamw, mean_loss, vectors
from tests.groups import DeferredGroup
from tests.sets import set_of


def host_weights(values: Tensor) -> HostWeights:
    return HostWeights(values.clone(), PretendedBoundary(Ledger()))


def test_dropped_weights_take_no_memory_and_come_back() -> None:
    weights = host_weights(torch.arange(6.0))
    weights.drop()
    assert weights.tensor.untyped_storage().nbytes() == 0
    weights.fetch()
    assert weights.tensor.isnan().all()  # nobody has waited
    weights.wait()
    assert weights.tensor.tolist() == [0, 1, 2, 3, 4, 5]


def test_what_was_stored_stays() -> None:
    weights = host_weights(torch.arange(3.0))
    weights.tensor.mul_(2)
    weights.store()
    weights.drop()
    assert weights.values.tolist() == [0, 2, 4]
    weights.fetch()
    weights.wait()
    assert weights.tensor.tolist() == [0, 2, 4]


def test_a_run_waits_for_the_copies_of_its_unit() -> None:
    weights = host_weights(torch.arange(6.0))
    tensor = nn.Parameter(weights.tensor[2:5])
    run = HostRun(weights, LocalParameter("w", tensor, tensor))
    weights.tensor.mul_(2)
    weights.store()
    assert run.memory.tolist() == [2, 3, 4]
    run.join()
    assert run.memory.tolist() == [4, 6, 8]
    weights.drop()
    weights.fetch()
    weights.join()
    assert weights.tensor.tolist() == [0, 2, 4, 6, 8, 10]


def test_what_was_not_stored_is_lost() -> None:
    weights = host_weights(torch.arange(3.0))
    weights.tensor.mul_(2)
    weights.drop()
    assert weights.values.tolist() == [0, 1, 2]


def test_closed_weights_let_go_of_the_memory_of_the_host() -> None:
    """The last copies kept it: a closed engine that somebody still held had all its pinned memory."""
    weights = host_weights(torch.arange(3.0))
    memory = weakref.ref(weights.memory.untyped_storage())
    weights.store()
    weights.drop()
    weights.fetch()
    weights.wait()
    weights.close()
    assert memory() is None


def test_a_second_fetch_copies_nothing() -> None:
    ledger = Ledger()
    weights = HostWeights(torch.ones(4), PretendedBoundary(ledger))
    weights.fetch()
    weights.drop()
    weights.fetch()
    weights.fetch()
    assert ledger.total("host", "fetch").payload == 16


def test_the_first_units_that_fit_stay_on_the_device() -> None:
    place = HostPlace(PretendedBoundary(Ledger()), resident_bytes=100)
    assert [place.boundary_for(size) is None for size in (60, 40, 1, 0)] == [True, True, False, True]


def test_nothing_stays_behind_a_unit_that_does_not_fit() -> None:
    place = HostPlace(PretendedBoundary(Ledger()), resident_bytes=100)
    assert [place.boundary_for(size) is None for size in (60, 50, 10)] == [True, False, False]


# A unit.


def unit_of(group: Group, *, whole: bool) -> HostUnit:
    parameters = [("a", nn.Parameter(torch.arange(4.0).view(2, 2))), ("b", nn.Parameter(torch.ones(3)))]
    boundary = PretendedBoundary(group.ledger)
    unit = HostUnit("unit", parameters, group, boundary=boundary, sharded=not whole)
    unit.free()
    return unit


def device_bytes(unit: FlatUnit) -> int:
    return sum({id(s): s.nbytes() for s in map(Tensor.untyped_storage, (unit.flat, unit.shard))}.values())


@pytest.mark.parametrize("whole", [False, True])
def test_a_unit_takes_device_memory_only_while_it_is_used(whole: bool) -> None:
    unit = unit_of(RecordingGroup("shard"), whole=whole)
    assert device_bytes(unit) == 0
    unit.gather()
    unit.synchronize()
    assert [p.tolist() for _, p in unit.parameters] == [[[0, 1], [2, 3]], [1, 1, 1]]
    assert device_bytes(unit) == unit.flat.nbytes  # a shard that was gathered is gone again
    unit.free()
    assert device_bytes(unit) == 0


def test_a_fetched_shard_is_gathered_by_the_second_call() -> None:
    unit = unit_of(RecordingGroup("shard"), whole=False)
    unit.gather()
    assert unit.flat.untyped_storage().nbytes() == 0
    unit.gather()
    assert unit.flat.untyped_storage().nbytes() > 0
    unit.synchronize()
    unit.free()
    assert device_bytes(unit) == 0


def test_a_fetch_that_nobody_uses_sends_no_message() -> None:
    group = RecordingGroup("shard")
    unit = unit_of(group, whole=False)
    unit.gather()
    unit.free()
    assert device_bytes(unit) == 0
    assert group.ledger.total("shard").count == 0


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_an_update_reaches_the_host_whether_or_not_the_unit_is_in_use(whole: bool, is_gathered: bool) -> None:
    unit = unit_of(RecordingGroup("shard"), whole=whole)
    if is_gathered:
        unit.gather()
    unit.bring()
    first, second = unit.local_parameters()
    with torch.no_grad():
        first.tensor.mul_(10)
    unit.put_back()
    unit.free()
    assert device_bytes(unit) == 0
    assert unit.stored_values(first).tolist() == [[0, 10], [20, 30]]
    assert unit.stored_values(second).tolist() == [1, 1, 1]


def test_a_change_by_a_pass_is_found() -> None:
    unit = unit_of(RecordingGroup("shard"), whole=True)
    unit.gather()
    unit.synchronize()
    unit.parameters[1][1].data.zero_()
    unit.free()
    assert unit.finish_watch() == ["b"]


def test_a_read_between_steps_says_where_the_weight_is() -> None:
    unit = unit_of(RecordingGroup("shard"), whole=True)
    with pytest.raises(UserError, match="with offload=parameters it lies in host memory"):
        unit.parameters[0][1].sum()


def test_ranks_share_what_the_host_has_updated_and_no_frozen_weights() -> None:
    """The next unit is on its way while ranks share one."""
    group, model = DeferredGroup(), nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    model[1].requires_grad_(False)
    place = HostPlace(PretendedBoundary(group.ledger), updates=True)
    sharing = Zero(set_of(model, group), 1, Wrapping(), host=place)
    group.ledger.start_step()
    sharing.publish()
    moves = [move.operation for move in group.ledger.moves if move.subject == "parameters"]
    shared = ["all_gather", "store"]
    assert moves == ["fetch", "fetch", *shared, "fetch", *shared, *shared]


class Scaled(nn.Module):
    """A parameter without dims beside matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.matrix = nn.Parameter(torch.tensor(1.5)), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix(x) * self.scale


@pytest.mark.parametrize("plan", ["offload=parameters", "offload=optimizer,parameters"])
def test_a_parameter_without_dims(plan: str) -> None:
    weights = []
    for each in ("data=1", plan):
        torch.manual_seed(0)
        with parallelize(
            Scaled().double(), f"{each} precision=fp64", optimizer=adamw, loss=mean_loss
        ) as engine:
            inputs, targets = vectors(0)
            engine.step((inputs.double(), targets))
            weights.append(engine.full_state_dict())
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-12)
