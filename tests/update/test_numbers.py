"""The numbers of an update: which error they stand for, and who has seen it."""

import math
import pickle
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from echelon.engine.step.runtime.flight import Microbatch
from echelon.errors import UserError
from echelon.parallel.data.sharing import Problem
from echelon.update import numbers as numbers_module
from echelon.update.numbers import (
    Counted,
    HostCopy,
    Outcome,
    Scaling,
    StepNumbers,
    Tallies,
    Tally,
    either,
    loss_and_count,
    rank_numbers,
    scale,
)
from tests.reads import no_reads


def numbers(*sums: float, flags: tuple[float, ...] = (), may_be_empty: bool = False) -> StepNumbers:
    values = torch.tensor([*sums, 1.0, 0.0, *flags], dtype=torch.float64)
    return StepNumbers(values, may_be_empty=may_be_empty)


def test_numbers_are_read_once_somebody_looks() -> None:
    step = numbers(8.0, 4.0, 5.0, flags=(0.0,))
    assert step.is_ready
    assert isinstance(step.norm, torch.Tensor), "it is where it was computed"
    assert step.read() == Outcome(8.0, 4.0, 5.0)
    assert step.norm == 5.0


def test_numbers_that_were_read_hold_no_memory_of_the_device_or_of_transfers() -> None:
    values = torch.tensor([8.0, 4.0, 5.0, 1.0, 0.0])
    step = StepNumbers(values)
    memory = [weakref.ref(values), weakref.ref(step._copy)]
    del values
    assert all(each() is not None for each in memory), "somebody may look"
    step.read()
    assert [each() for each in memory] == [None, None]
    assert step.read() == Outcome(8.0, 4.0, 5.0)


def test_an_error_is_raised_at_every_look_and_once_seen_is_known() -> None:
    step = numbers(0.0, 0.0, 0.0, flags=(0.0,))
    for _ in range(2):
        with pytest.raises(UserError, match="no replica had a sample that the loss counts"):
            step.read()
    assert isinstance(step.error(), UserError)


def test_an_update_of_no_samples_may_be_none_s_error() -> None:
    assert numbers(0.0, 0.0, 0.0, may_be_empty=True).read() == Outcome(0.0, 0.0, 0.0)


def test_a_problem_comes_before_the_count_that_it_may_have_spoilt() -> None:
    with pytest.raises(UserError, match="ranks ran different modules in this step"):
        numbers(0.0, 0.0, 0.0, flags=(2.0,), may_be_empty=True).read()


def test_numbers_go_to_other_processes_as_values() -> None:
    assert pickle.loads(pickle.dumps(numbers(8.0, 4.0, 5.0, flags=(0.0,)))).read() == Outcome(8.0, 4.0, 5.0)
    assert StepNumbers.known(Outcome(1.0, 2.0, 3.0)).read() == Outcome(1.0, 2.0, 3.0)


def test_a_skipped_step_has_numbers_and_no_error() -> None:
    """Gradients that are not finite have no norm, whether the sum of squares is infinite or no number."""
    for norm in (float("inf"), float("nan")):
        step = StepNumbers([8.0, 4.0, norm, 1024.0, 1.0, 0.0])
        assert step.error() is None
        assert step.read() == Outcome(8.0, 4.0, float("inf"), 1024.0, 1.0)


def test_a_mean_over_nothing_is_refused() -> None:
    assert loss_and_count(6.0, 2.0, 2.0) == (6.0, 2.0)
    assert loss_and_count(6.0, 2.0, 0.0) == (12.0, 2.0)  # a sum, divided by its count later
    with pytest.raises(UserError, match="no replica had a sample that the loss counts; give the step one"):
        loss_and_count(0.0, 0.0, 0.0)
    with pytest.raises(UserError, match="this worker had no sample that the loss counts; give every worker"):
        StepNumbers.known(Outcome(0.0, 0.0, 0.0), of_worker=True).read()


def test_the_losses_of_gates_are_beside_the_total() -> None:
    step = StepNumbers([8.0, 4.0, 5.0, 1.0, 0.0, 0.0, 0.0, 0.25], gate_errors=["first", "second"])
    assert step.read() == Outcome(8.0, 4.0, 5.0, auxiliary=0.25)
    assert pickle.loads(pickle.dumps(step)).read() == step.read()


def test_a_gate_whose_statistics_are_not_finite_is_named() -> None:
    """Also where that is the reason of another problem."""
    flags = [0.0] * (len(Problem) - 1) + [1.0]
    step = StepNumbers([8.0, 4.0, 5.0, 1.0, 0.0, *flags, 0.0, 2.0, 0.25], gate_errors=["first", "second"])
    assert str(step.error()) == "second"


def test_what_a_step_has_unless_it_is_told() -> None:
    assert Outcome(1.0, 2.0, 3.0) == (1.0, 2.0, 3.0, 1.0, 0.0, 0.0, 0.0)
    assert Microbatch(None, None, 1, "")[4:] == (nullcontext, None, 1.0)


def test_numbers_of_the_host_are_there() -> None:
    copy = HostCopy(torch.tensor([1.0, 2.0]))
    assert (copy.is_ready, copy.wait()) == (True, [1.0, 2.0])
    step = StepNumbers([8.0, 4.0, 5.0, 1.0, 0.0])
    assert (step.is_ready, step.norm) == (True, 5.0)


@pytest.mark.parametrize("place", range(len(Problem)))
def test_every_problem_has_its_words(place: int) -> None:
    flags = tuple(float(number == place) for number in range(len(Problem)))
    assert str(numbers(8.0, 4.0, 5.0, flags=flags).error()) == list(Problem)[place].value


def test_the_first_of_several_problems_and_gates_is_told() -> None:
    assert str(numbers(8.0, 4.0, 5.0, flags=(0.0, 1.0, 1.0, 0.0)).error()) == list(Problem)[1].value
    step = StepNumbers([8.0, 4.0, 5.0, 1.0, 0.0, 1.0, 1.0, 0.25], gate_errors=["first", "second"])
    assert str(step.error()) == "first"


def test_a_norm_that_is_no_number_is_told_unless_the_step_was_skipped() -> None:
    assert math.isnan(StepNumbers([8.0, 4.0, math.nan, 1.0, 0.0]).read().norm)


def test_numbers_of_a_worker_and_of_all() -> None:
    for of_worker, words in ((False, "no replica had a sample"), (True, "this worker had no sample")):
        with pytest.raises(UserError, match=words):
            StepNumbers([0.0, 0.0, 0.0, 1.0, 0.0], of_worker=of_worker).read()
    with pytest.raises(UserError, match="no replica had a sample"):
        StepNumbers.known(Outcome(0.0, 0.0, 0.0)).read()


class FakeEvent:
    """Of a device that is done when somebody waits."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def record(self) -> None:
        self.calls.append("record")

    def query(self) -> bool:
        return "synchronize" in self.calls

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def test_numbers_of_a_device_are_copied_to_pinned_memory_and_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[bool] = []

    class Torch:
        cuda = SimpleNamespace(Event=FakeEvent)

        @staticmethod
        def empty(shape: torch.Size, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
            pinned.append(pin_memory)
            return torch.empty(shape, dtype=dtype)

    class OnDevice(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    monkeypatch.setattr(numbers_module, "torch", Torch)
    source = torch.tensor([1.0, 2.0]).as_subclass(OnDevice)
    copy = HostCopy(source)
    event: Any = copy._copied
    assert (pinned, event.calls, copy.is_ready) == ([True], ["record"], False)
    source.zero_()
    assert (copy.wait(), copy.is_ready) == ([1.0, 2.0], True)
    assert event.calls == ["record", "synchronize"]


CASES = {
    "sums": ((8.0, 4.0, 4.0, 400.0, 0.0), None),
    "means": ((8.0, 4.0, 16.0, 25.0, 0.0), None),
    "another count": ((8.0, 5.0, 20.0, 25.0, 0.0), 2.0),
    "clipped": ((8.0, 4.0, 4.0, 400.0, 0.0), 1.0),
    "no norm": ((8.0, 4.0, 12.0, 0.0, 0.0), 1.0),
    "a problem": ((8.0, 4.0, 28.0, 400.0, 2.0), 1.0),
    "not finite": ((8.0, 4.0, 28.0, math.inf, 0.0), 1.0),
    "no number": ((8.0, 4.0, 28.0, math.nan, 0.0), None),
    "no loss": ((math.nan, 4.0, 28.0, 400.0, 0.0), None),
    "no count": ((8.0, math.inf, math.inf, 400.0, 0.0), 1.0),
}


def on_device(sums: tuple[float, ...], clip: float | None, **rules: bool) -> Scaling:
    summed = torch.tensor(sums, dtype=torch.float64)
    with no_reads():
        on_device = scale(summed, clip, **rules)
    return Scaling(*(torch.as_tensor(value).item() for value in on_device))


def test_the_numbers_of_a_step_by_hand() -> None:
    scaling = scale((8.0, 5.0, 20.0, 25.0, 0.0), 2.0)
    assert scaling == pytest.approx((4 / 5 * 2.0 / (4.0 + 1e-6), False, False, 4.0, False))


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_host_and_device_compute_the_same(name: str, scaled: bool, skips: bool) -> None:
    rules = {"scaled": scaled, "skips": skips}
    expected = scale(*CASES[name], **rules)
    assert on_device(*CASES[name], **rules) == pytest.approx(expected, rel=1e-15, nan_ok=True)


def test_an_update_of_no_samples_is_skipped() -> None:
    for each in (scale, on_device):
        scaling = each((0.0, 0.0, 0.0, 9.0, 0.0), 1.0)
        assert (scaling.skip, scaling.refused, scaling.norm) == (True, True, 0.0)


@pytest.mark.parametrize("square", [math.inf, math.nan])
def test_squares_that_are_not_finite_are_an_overflow_where_losses_are_scaled(square: float) -> None:
    for each in (scale, on_device):
        overflow = each((8.0, 4.0, 4.0, square, 0.0), None, scaled=True)
        assert (overflow.skip, overflow.refused, overflow.overflows) == (True, False, True)
        assert not each((8.0, 4.0, 4.0, square, 0.0), None).skip, "fp32 trains on, as one device does"
        problem = each((8.0, 4.0, 4.0, square, 1.0), None, scaled=True)
        assert (problem.refused, problem.overflows) == (True, False), "refused: it says nothing of the scale"
        assert not each((8.0, 4.0, 4.0, 65504.0**2, 0.0), None, scaled=True).skip


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_loss_a_count_or_gradients_that_are_not_finite_leave_a_step_out(place: int, value: float) -> None:
    sums = [8.0, 4.0, 4.0, 400.0, 0.0]
    sums[place] = abs(value) if place == 3 else value  # squares have no sign
    for each in (scale, on_device):
        scaling = each(tuple(sums), None, skips=True)
        assert (scaling.skip, scaling.left_out, scaling.overflows) == (True, True, False)
        assert not each(tuple(sums), None).skip
        sums[4] = 1.0
        refused = each(tuple(sums), None, skips=True)
        assert (refused.refused, refused.left_out) == (True, False), "a problem is told as such"
        sums[4] = 0.0
        assert not each((8.0, 4.0, 4.0, 400.0, 0.0), None, skips=True).skip


def test_of_scaled_losses_an_overflow_of_gradients_alone_is_the_scales_affair() -> None:
    for each in (scale, on_device):
        overflow = each((8.0, 4.0, 4.0, math.inf, 0.0), None, scaled=True, skips=True)
        assert (overflow.skip, overflow.overflows, overflow.left_out) == (True, True, False)
        loss = each((math.nan, 4.0, 4.0, math.nan, 0.0), None, scaled=True, skips=True)
        assert (loss.skip, loss.overflows, loss.left_out) == (True, True, True)


def test_tallies_of_an_update_know_the_last_row_of_its_own_loss_and_end_with_the_sum() -> None:
    tallies = Tallies()
    assert not tallies
    assert [tallies.next_pass(), tallies.next_pass()] == [0, 1], "also of losses that are still to come"
    tallies.add(Tally(torch.ones(3), Counted(2.0, 4.0)))
    assert tallies.known == (2.0, 4.0)
    assert (len(tallies), tallies.own, tallies.joined().tolist()) == (1, None, [1.0] * 3)
    tallies.add(Tally(torch.zeros(3)), is_own=True)
    assert tallies.known is None
    tallies.add(Tally(torch.ones(3)), is_summed=True)
    assert (tallies.own, tallies.joined().tolist()) == (1, [[1.0] * 3, [0.0] * 3, [1.0] * 3])
    with pytest.raises(UserError, match="summed over ranks already"):
        tallies.next_pass()


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("total", [6.0, math.inf])
def test_numbers_of_one_rank_are_those_of_sums_over_ranks(
    total: float, skips: bool, clip: float | None
) -> None:
    row, square = torch.tensor([total, 4.0, 32.0], dtype=torch.float64), torch.tensor(9.0).double()
    scaling = scale([total, 4.0, 32.0, 9.0], clip, skips=skips)
    with no_reads():
        found = [rank_numbers(row, square, known, clip, skips=skips) for known in (None, Counted(4.0, 32.0))]
    for each in found:
        numbers = StepNumbers(each.values, known=(*each.known, 0.0), tells_ways=True)
        assert numbers.outcome[:3] == (total, 4.0, scaling.norm)
        assert numbers.outcome.num_skipped == scaling.left_out
        assert [float(each.scaling.factor), bool(each.scaling.skip)] == [scaling.factor, scaling.skip]
    assert found[1].known[1:2] == (4.0,)
    assert found[1].scaling.refused is False, "which the host knows"
    assert found[1].scaling.factor == 2.0 or clip


def test_what_losses_count_is_known_until_one_counts_on_the_device() -> None:
    counted = Counted(0.0, 0.0).plus(2, 4.0)
    assert counted == (2.0, 4.0)
    assert counted.plus(1, 1.0) == (3.0, 5.0)
    assert counted.plus(torch.ones(()), 1.0) is None


def test_a_flag_that_is_known_takes_no_operation() -> None:
    flag = torch.tensor(True)
    assert either(flag, False) is flag
    assert either(False, flag) is flag
    assert either(torch.tensor(False), flag).item() is True
    for one in (False, True):
        for other in (False, True):
            assert either(one, other) == (one or other)
