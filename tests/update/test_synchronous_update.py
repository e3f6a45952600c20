"""The numbers that ranks sum for one update, and what follows from flags, gates and units among them."""

import math
from typing import Any

import pytest
import torch

from echelon.collectives import RecordingGroup
from echelon.errors import UserError
from echelon.parallel.data.sharing import Problem
from echelon.parallel.stage import LocalStages
from echelon.state.ownership import ENGINE, OwnedSlice, Slice, own_counter
from echelon.update import synchronous_update
from echelon.update.numbers import GateNumbers, Outcome
from echelon.update.synchronous_update import (
    SynchronousUpdate,
    _boxes,
    _check_unchanged,
    _flag_wrong_count,
    _on_device,
    _with_gates,
)
from tests.update.test_update import SCALE, Updated, tally

FIRST_FLAG = 4  # behind total, count, weighted count and square


def place(problem: Problem) -> int:
    return FIRST_FLAG + list(Problem).index(problem)


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """What this rank gives to each sum over ranks."""
    given: list[list[float]] = []
    monkeypatch.setattr(synchronous_update, "_sum", lambda numbers, _: given.append(numbers.tolist()))
    return given


def norm(updated: Updated, gradient: list[float], gates: GateNumbers | None = None) -> Outcome:
    updated.update.start_step()
    updated.weight.grad = torch.tensor(gradient, dtype=torch.float64)
    updated.update.norm(tally(8.0, 4.0, 1.0), gates)
    return updated.update.numbers.outcome


def test_what_a_rank_gives_to_the_sum(summed: list[list[float]]) -> None:
    norm(Updated(), [3.0, 4.0])
    assert summed == [[8.0, 4.0, 4.0, 25.0, *[0.0] * len(Problem), 0.0]]


def test_the_ranks_that_took_another_way_are_counted_and_refuse_nothing(summed: list[list[float]]) -> None:
    updated = Updated()
    updated.update.took_other_way = True
    outcome = norm(updated, [3.0, 4.0], gates_of(0.0, 0.0))
    assert (summed[0][-1], outcome.other_ways, outcome.auxiliary) == (1.0, 1.0, 0.25)
    assert not updated.update.refuses


@pytest.mark.parametrize(("rank", "weight"), [(0, 2.0), (1, -1.0), (2, -1.0)])
def test_changes_that_are_the_same_on_all_ranks_cancel(
    summed: list[list[float]], rank: int, weight: float
) -> None:
    updated = Updated(RecordingGroup("all", rank, 3))
    updated.update.take_over(set(), 7.0)
    norm(updated, [3.0, 4.0])
    updated.update.refuse_next()
    norm(updated, [3.0, 4.0])
    norm(updated, [3.0, 4.0])
    assert [each[place(Problem.DIFFERENT_CHANGE)] for each in summed] == [weight * 7.0, 0.5, 0.0]
    assert all(sum(each[FIRST_FLAG:]) == each[place(Problem.DIFFERENT_CHANGE)] for each in summed)


def test_a_change_that_is_lost_is_flagged(summed: list[list[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    updated = Updated()
    for loses in (True, False):
        monkeypatch.setattr(type(updated.update.stepper), "loses_change", property(lambda _, x=loses: x))
        norm(updated, [3.0, 4.0])
    assert [each[place(Problem.LOST_CHANGE)] for each in summed] == [1.0, 0.0]


def gates_of(*broken: float) -> GateNumbers:
    errors = [f"gate {number} is broken" for number in range(len(broken))]
    return GateNumbers(torch.tensor(0.25).double(), torch.tensor(broken).double(), errors)


@pytest.mark.parametrize("deferred", [False, True])
def test_losses_and_errors_of_gates(deferred: bool) -> None:
    updated = Updated(deferred=deferred)
    assert norm(updated, [3.0, 4.0], gates_of(0.0, 0.0)) == Outcome(8.0, 4.0, 5.0 / 4, auxiliary=0.25)
    assert updated.update.numbers.error() is None
    norm(updated, [3.0, 4.0], gates_of(0.0, 1.0))
    assert str(updated.update.numbers.error()) == "gate 1 is broken"
    assert bool(updated.update.refuses)


def skipping(**options: Any) -> Updated:
    updated = Updated(**options)
    updated.update._skips_nonfinite = True
    return updated


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("broken", [0.0, 1.0])
def test_where_steps_are_left_out_a_broken_gate_leaves_one_out(deferred: bool, broken: float) -> None:
    updated = skipping(deferred=deferred)
    outcome = norm(updated, [3.0, 4.0], gates_of(0.0, broken))
    assert updated.update.numbers.error() is None
    assert (outcome.num_skipped, outcome.auxiliary, math.isnan(outcome.total)) == (broken, 0.25, bool(broken))
    assert (bool(updated.update.skips), bool(updated.update.undoes)) == (bool(broken), bool(broken))
    assert not bool(updated.update.refuses)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_step_that_is_left_out_is_no_guide(deferred: bool) -> None:
    updated = skipping(deferred=deferred)
    updated.step(8.0, 4.0, [1.0, 1.0])
    before = updated.weight.detach().clone()
    assert updated.step(8.0, 5.0, [math.nan, 1.0]).num_skipped == 1
    assert torch.equal(updated.weight, before)
    assert updated.update.start_step() == 4.0


@pytest.mark.parametrize("deferred", [False, True])
def test_the_first_step_may_be_left_out(deferred: bool) -> None:
    updated = skipping(deferred=deferred)
    updated.step(8.0, 5.0, [math.nan, 1.0])
    assert updated.update.start_step() == (0.0 if deferred else None)


def test_a_loss_scale_is_not_moved_by_a_step_that_is_left_out() -> None:
    updated = skipping(loss_scale=SCALE)
    updated.step(2.0, 2.0, [1.0, 1.0])
    updated.step(math.nan, 2.0, [1.0, 1.0])
    owned = {
        each.slice.part: each.tensor.item() for each in updated.update.owned() if each.slice.name == ENGINE
    }
    assert owned == {"normaliser": 2.0, "loss scale": 64.0, "good steps": 1.0}


def test_numbers_of_a_checkpoint_are_taken_over() -> None:
    updated = Updated(loss_scale=SCALE, steady=False)
    updated.step(2.0, 2.0, [math.inf, 1.0])
    updated.update.restore({"begun steps": 7, "normaliser": 3.0, "loss scale": 8.0, "good steps": 1.0})
    assert (updated.update.number, updated.update.start_step()) == (7, 3.0)
    assert (float(updated.update.loss_scale), updated.update.pop_overflows()) == (8.0, 0.0)
    updated.update.restore({"begun steps": 0, "normaliser": 0.0, "loss scale": 8.0, "good steps": 1.0})
    assert updated.update.start_step() is None


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As often as buffers are shared."""
    calls: list[int] = []
    monkeypatch.setattr(LocalStages, "publish", lambda _: calls.append(1))
    return calls


def test_a_step_that_is_refused_shares_no_buffers(published: list[int]) -> None:
    Updated().update_weights(2.0, 0.0, [1.0, 1.0])
    assert published == []
    Updated().update_weights(2.0, 2.0, [1.0, 1.0])
    assert published == [1]


def test_a_refusal_is_read_until_the_first_step_that_publishes(published: list[int]) -> None:
    updated = Updated(deferred=True)
    updated.update_weights(2.0, 0.0, [1.0, 1.0])
    assert published == []
    updated.update_weights(2.0, 2.0, [1.0, 1.0])
    updated.update_weights(2.0, 0.0, [1.0, 1.0])
    assert published == [1, 1], "from then on nobody reads it"


class Stepper:
    """As far as an end of updates needs one."""

    def __init__(self, *, is_late: bool, loses_change: bool = False) -> None:
        self.is_late, self.loses_change, self.temporary = is_late, loses_change, list[bool]()

    def finish(self, *, temporary: bool = False) -> bool:
        self.temporary.append(temporary)
        return self.is_late


@pytest.mark.parametrize("is_late", [False, True])
def test_weights_that_come_late_are_shared(is_late: bool) -> None:
    updated = Updated()
    stepper: Any = Stepper(is_late=is_late)
    updated.update.stepper = stepper
    shared: list[int] = []
    updated.local.sharings[0].share_first_weights = lambda: shared.append(1)  # type: ignore[method-assign]
    updated.update.synchronize()
    updated.update.show_newest()
    assert (stepper.temporary, len(shared)) == ([False, True], 2 * is_late)


def test_a_change_that_an_update_has_overwritten_is_told_at_the_end() -> None:
    updated = Updated()
    updated.update.stepper = Stepper(is_late=True, loses_change=True)  # type: ignore[assignment]
    with pytest.raises(UserError, match="This change is lost"):
        updated.update.synchronize()
    updated.update.stepper = Stepper(is_late=False, loses_change=True)  # type: ignore[assignment]
    updated.update.synchronize()
    _check_unchanged(loses_change=False)


def test_weights_of_the_host_are_shared_before_a_step() -> None:
    updated = Updated()
    shared: list[int] = []
    updated.local.sharings[0].share_first_weights = lambda: shared.append(1)  # type: ignore[method-assign]
    updated.update.start_step()
    assert shared == []
    updated.update.stepper.undo_finish = lambda: True  # type: ignore[method-assign]
    updated.update.start_step()
    assert shared == [1]


def test_only_what_the_user_has_changed_is_taken_over() -> None:
    updated = Updated()
    calls: list[Any] = []
    updated.update.stepper.take_over = calls.append  # type: ignore[method-assign]
    sharing = updated.local.sharings[0]
    sharing.take_over = lambda changed: calls.append(set(changed))  # type: ignore[method-assign]
    updated.update.take_over(set(), 1.0)
    assert calls == [set()]
    updated.update.take_over({updated.weight}, 1.0)
    assert calls[1] == {updated.weight}
    assert [each.parameter for each in calls[2]] == [updated.weight]


class Units:
    def __init__(self, *, skip: bool = False, rehearsal: object = None) -> None:
        self.rehearsal, self._skip = rehearsal, skip

    def skip(self) -> bool:
        return self._skip


@pytest.mark.parametrize(
    ("count", "scaled", "skip", "flag"),
    [
        (4.0, 16.0, False, 0.0),
        (4.0, 16.0 * (1 + 0.9e-9), False, 0.0),
        (4.0, 16.0 * (1 + 1.1e-9), False, 1.0),
        (4.0, 12.0, False, 1.0),
        (4.0, 20.0, False, 1.0),
        (4.0, 16.0, True, 1.0),  # units were left as they were, and there were samples
        (0.0, 0.0, True, 0.0),
        (0.0, 0.0, False, 0.0),
    ],
)
def test_units_were_updated_by_the_right_count(count: float, scaled: float, skip: bool, flag: float) -> None:
    units: Any = Units(skip=skip)
    sums = torch.tensor([8.0, count, scaled, 25.0, *[0.0] * len(Problem)], dtype=torch.float64)
    _flag_wrong_count(sums, units)
    assert sums[place(Problem.WRONG_COUNT)] == flag
    assert sums[FIRST_FLAG:].sum() == flag
    rehearsed = torch.tensor([8.0, 4.0, 12.0, 25.0, *[0.0] * len(Problem)], dtype=torch.float64)
    _flag_wrong_count(rehearsed, Units(rehearsal=object()))  # type: ignore[arg-type]
    assert not rehearsed[FIRST_FLAG:].any()


def test_flags_of_gates_become_a_loss_that_is_no_number() -> None:
    sums = torch.tensor([8.0, 4.0, 1.0, 0.0, 0.0])
    assert _with_gates(sums, torch.tensor([0.25]), 2).tolist() == [8.0, 4.0, 1.0]
    for auxiliary, broken in ((math.inf, 0.0), (math.nan, 0.0), (0.25, 1.0)):
        sums[-1] = broken
        found = _with_gates(sums, torch.tensor([auxiliary]), 2)
        assert (math.isnan(found[0]), found[1:].tolist()) == (True, [4.0, 1.0])


def test_boxes_of_a_whole_tensor_and_of_a_run() -> None:
    whole = Slice("w", "value", (2, 3), (0, 0), (2, 3))
    like = torch.arange(6.0).reshape(2, 3)
    (box,) = _boxes(like, slices=[whole], in_whole=lambda own: [own])
    assert box.tensor is like
    run = [Slice("w", "value", (2, 3), (0, 1), (1, 2)), Slice("w", "value", (2, 3), (1, 0), (1, 3))]
    parts = _boxes(torch.arange(5.0), slices=run, in_whole=lambda own: [own, own])
    assert [each.tensor.tolist() for each in parts] == [[[0, 1]], [[0, 1]], [[2, 3, 4]], [[2, 3, 4]]]
    (flat,) = _boxes(torch.arange(6.0), slices=[whole], in_whole=lambda own: [own])
    assert flat.tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_counters_are_owned_as_float64() -> None:
    assert own_counter("version", 3, torch.int64).tensor.dtype == torch.int64
    for value in (3.0, torch.tensor(3.0)):
        owned = own_counter("steps", value)
        assert isinstance(owned, OwnedSlice)
        assert (owned.slice, owned.tensor.dtype, owned.tensor.item()) == (
            Slice(ENGINE, "steps", (), (), ()),
            torch.float64,
            3.0,
        )
    like = torch.zeros(2, dtype=torch.float64)
    for number in (True, 1.0, torch.tensor(1.0), torch.tensor(True)):
        found = _on_device(number, like)
        assert (found.dtype, found.shape, found.item()) == (torch.float64, (), 1.0)


def test_nothing_is_special_unless_it_is_told() -> None:
    updated = Updated()
    update = SynchronousUpdate(
        updated.local, updated.update.stepper, RecordingGroup("all"), None, everyone=RecordingGroup("all")
    )
    assert (update.deferred, update.units, update.loss_scaling) == (False, None, None)
    assert (update._steady, update._skips_nonfinite, update.loss_scale) == (True, False, 1.0)
