"""Updates of whole parameters: parts go to the rank that updates them, and back. One rank is both here."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Group, RecordingGroup
from echelon.nn.hashing import hash_of
from echelon.state.ownership import MASTER, LocalParameter, own_run, run_slices
from echelon.update.precision.optimizer_call import HostCall
from echelon.update.precision.rounding import KeyedRounding, round_stochastically, whole_run
from echelon.update.precision.whole_stepper import PartRoute, Routes, WholeRoute, WholeStepper
from tests.thread_ranks import run_threads

SHAPE = (3, 4)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.1)


def local_run(dtype: torch.dtype) -> LocalParameter:
    """The elements of a matrix as a run, as zero has them."""
    values = torch.arange(12, dtype=dtype)
    return LocalParameter("w", nn.Parameter(values.view(SHAPE)), nn.Parameter(values.clone()))


def stepper_of(local: LocalParameter, **options: Any) -> WholeStepper:
    slices = [box for begin, end in ((0, 6), (6, 12)) for box in run_slices("w", SHAPE, begin, end)]

    def views(tensor: Tensor) -> list[Tensor]:
        return [owned.tensor for owned in own_run(tensor, slices)]

    group = RecordingGroup("stage")
    routes = Routes(
        group,
        [PartRoute(local, 0, views)],
        [WholeRoute(local, 0, slices)],
        torch.float32,
        torch.device("cpu"),
    )
    return WholeStepper(muon([local.parameter]), routes, **{"masters": False, **options})


def gradient(step: int) -> Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("deferred", [False, True])
def test_parts_are_updated_as_the_whole(deferred: bool) -> None:
    local, whole = local_run(torch.float32), nn.Parameter(torch.arange(12.0).view(SHAPE))
    stepper, reference = stepper_of(local, deferred=deferred), muon([whole])
    for step in range(3):
        local.tensor.grad, whole.grad = gradient(step), 0.5 * gradient(step).view(SHAPE)
        stepper.step(torch.tensor(0.5).double() if deferred else 0.5)
        reference.step()
    assert torch.equal(local.tensor.view(SHAPE), whole)
    (owned,) = stepper.held_whole()
    assert owned.slice.part == "momentum_buffer"
    assert owned.slice.shape == SHAPE
    assert torch.equal(owned.tensor, reference.state[whole]["momentum_buffer"])


def test_a_weight_that_somebody_has_changed_is_updated_as_it_is() -> None:
    local = local_run(torch.float32)
    stepper = stepper_of(local)
    local.tensor.grad = gradient(0)
    stepper.step(1.0)
    local.tensor.data.zero_()
    local.tensor.grad = torch.zeros(12)
    stepper.step(0.0)
    assert float(local.tensor.detach().abs().max()) < 0.2, "one update from zero"


def test_below_float32_whole_masters_stay() -> None:
    local, master = local_run(torch.bfloat16), nn.Parameter(torch.arange(12.0).view(SHAPE))
    stepper, reference = stepper_of(local, masters=True), muon([master])
    local.tensor.grad_dtype = torch.float32
    assert not stepper.held_whole()
    for step in range(3):
        local.tensor.grad, master.grad = gradient(step), gradient(step).view(SHAPE)
        stepper.step(1.0)
        reference.step()
    held = {owned.slice.part: owned.tensor for owned in stepper.held_whole()}
    assert torch.equal(held[MASTER], master)
    assert torch.equal(local.tensor.view(SHAPE), master.bfloat16())


def test_a_parameter_without_a_gradient_has_a_master_too() -> None:
    """As it has on one device, whose masters are those of all weights."""
    local = local_run(torch.bfloat16)
    stepper = stepper_of(local, masters=True)
    stepper.step(1.0)
    (owned,) = stepper.held_whole()
    assert owned.slice.part == MASTER
    assert owned.tensor.tolist() == torch.arange(12.0).view(SHAPE).tolist()
    assert local.tensor.tolist() == list(range(12))


@pytest.mark.parametrize("deferred", [False, True])
def test_a_skipped_update_and_one_without_gradients_change_nothing(deferred: bool) -> None:
    local = local_run(torch.float32)
    stepper = stepper_of(local, deferred=deferred)
    local.tensor.grad = torch.full((12,), float("nan"))
    stepper.step(1.0, torch.tensor(True) if deferred else True)
    local.tensor.grad = None
    stepper.step(1.0)
    assert local.tensor.tolist() == list(range(12))
    assert not stepper.held_whole()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)


class TwoRanks:
    """One of two ranks that hold halves of p and q. Rank 0 updates p, rank 1 updates q."""

    def __init__(self, group: Group, dtype: torch.dtype, **options: Any) -> None:
        self.group, rank = group, group.rank
        wholes = {name: nn.Parameter(torch.arange(12, dtype=dtype).view(SHAPE)) for name in ("p", "q")}
        halves = [(0, 6), (6, 12)]
        begin, end = halves[rank]
        self.local = {
            name: LocalParameter(
                name, whole, nn.Parameter(whole.detach().flatten()[begin:end].clone()), begin
            )
            for name, whole in wholes.items()
        }

        def views(name: str) -> Any:
            slices = run_slices(name, SHAPE, begin, end)
            return lambda tensor: [owned.tensor for owned in own_run(tensor, slices)]

        parts = [PartRoute(self.local[name], target, views(name)) for target, name in enumerate(("p", "q"))]
        own = ("p", "q")[rank]
        routes = Routes(
            group,
            parts,
            [
                WholeRoute(self.local[own], source, run_slices(own, SHAPE, *halves[source]))
                for source in range(2)
            ],
            torch.float32,
            torch.device("cpu"),
        )
        self.stepper = WholeStepper(sgd(list(wholes.values())), routes, **{"masters": False, **options})

    def step(self, gradient: float | None = 1.0, **options: Any) -> None:
        for each in self.local.values():
            each.tensor.grad_dtype = torch.float32  # type: ignore[attr-defined]
            each.tensor.grad = None if gradient is None else torch.full((6,), gradient)
        self.stepper.step(1.0, **options)

    def values(self) -> list[list[float]]:
        return [each.tensor.tolist() for each in self.local.values()]


def on_two_ranks(test: Any) -> None:
    run_threads(2, test)


def test_each_rank_updates_its_parameters_for_both() -> None:
    def run(group: Group) -> None:
        ranks = TwoRanks(group, torch.float32)
        start = 6.0 * group.rank
        ranks.step()
        assert ranks.values() == [[start + k - 1 for k in range(6)]] * 2
        ranks.step()
        assert ranks.values() == [[start + k - 2.5 for k in range(6)]] * 2, "with momentum"
        ((name, whole),) = ranks.stepper.updated_tensors()
        assert name == "pq"[group.rank]
        assert whole.untyped_storage().nbytes() == 4, "between updates it takes no memory"
        assert whole.grad is None
        assert type(ranks.stepper._call) is HostCall
        assert {move.subject for move in group.ledger.moves} == {"optimizer"}

    on_two_ranks(run)


def test_of_a_unit_no_other_parameter_is_updated() -> None:
    def run(group: Group) -> None:
        ranks = TwoRanks(group, torch.float32)
        start = 6.0 * group.rank
        ranks.step(unit=[ranks.local["q"]])
        assert ranks.values() == [[start + k for k in range(6)], [start + k - 1 for k in range(6)]]

    on_two_ranks(run)


@pytest.mark.parametrize(("by_unit", "names"), [(False, ["p", "q"]), (True, ["", "q"])])
def test_masters_of_what_is_on_the_device_are_made(by_unit: bool, names: list[str]) -> None:
    def run(group: Group) -> None:
        ranks = TwoRanks(group, torch.bfloat16, masters=True)
        ranks.stepper.by_unit = by_unit
        ranks.step(unit=[ranks.local["q"]])
        held = [owned.slice.name for owned in ranks.stepper.held_whole() if owned.slice.part == MASTER]
        assert held == [name for name in [names[group.rank]] if name]

    on_two_ranks(run)


def test_masters_take_over_the_elements_that_somebody_has_changed() -> None:
    def run(group: Group) -> None:
        ranks = TwoRanks(group, torch.bfloat16, masters=True)
        ranks.stepper.take_over(list(ranks.local.values()))  # there are none
        ranks.step(1e-3)
        weight = ranks.local["p"].tensor
        weight.data[0] = 100.0
        ranks.stepper.take_over(list(ranks.local.values()))
        ranks.step(0.0)
        if group.rank == 0:
            held = {owned.slice.part: owned.tensor for owned in ranks.stepper.held_whole()}
            expected = torch.arange(12.0) - 1e-3 - 5e-4
            expected[[0, 6]] = 100.0 - 5e-4
            assert held[MASTER].flatten().tolist() == pytest.approx(expected.tolist())
        assert weight.tolist()[0] == 100.0
        ranks.step(0.0)  # what is taken over is so once
        assert weight.tolist()[0] == 100.0

    on_two_ranks(run)


def test_without_masters_results_are_rounded_by_the_key_of_the_update() -> None:
    def run(group: Group) -> None:
        ranks = TwoRanks(group, torch.bfloat16, rounding=KeyedRounding(7))
        ranks.stepper.start_update(4)
        ranks.step(1e-3)
        for name, each in ranks.local.items():
            value = torch.arange(12.0) - 1e-3
            expected = torch.empty(12, dtype=torch.bfloat16)
            key = hash_of(7, 5, hash_of(*name.encode()))
            round_stochastically(expected, value, key, [whole_run(value)])
            assert torch.equal(each.tensor.detach(), expected[each.begin : each.begin + 6])

    on_two_ranks(run)


class SavedWhole:
    """A checkpoint of one parameter."""

    finest = "value"

    def __init__(self, value: Tensor, parts: dict[str, Tensor]) -> None:
        self.parts, self.numbers, self.state_parts = parts, dict[str, float](), list(parts)
        self._all = {"value": value, **parts}

    def whole(self, part: str) -> Tensor:
        return self._all[part]


@pytest.mark.parametrize("masters", [False, True])
def test_the_rank_that_updates_a_parameter_loads_its_state(masters: bool) -> None:
    def run(group: Group) -> None:
        dtype = torch.bfloat16 if masters else torch.float32
        ranks = TwoRanks(group, dtype, masters=masters)
        value, momentum = torch.full(SHAPE, 1.001), torch.full(SHAPE, 2.0)
        for each in ranks.local.values():
            each.tensor.data.fill_(1)
            saved: Any = SavedWhole(value, {"momentum_buffer": momentum})
            ranks.stepper.load(each, saved)
        held = {owned.slice.part: owned.tensor for owned in ranks.stepper.held_whole()}
        assert held.keys() == {"momentum_buffer", *([MASTER] if masters else [])}
        ranks.step(0.0)
        held = {owned.slice.part: owned.tensor for owned in ranks.stepper.held_whole()}
        assert torch.equal(held["momentum_buffer"], torch.ones(SHAPE))
        if masters:
            torch.testing.assert_close(held[MASTER], torch.full(SHAPE, 0.001))
        else:
            assert ranks.values() == [[0.0] * 6] * 2

    on_two_ranks(run)
