"""Each group's rate is its own base rate times the factor of the step, whatever was set before."""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from echelon import UserError
from echelon.update.optim import LearningRate, Schedule, by_name, constant, cosine, wsd
from echelon.update.optim.learning_rate import Factor, schedule_errors


def make_optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.5, 0.25)]
    return torch.optim.SGD(groups, lr=0.1)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_every_group_keeps_its_proportion() -> None:
    optimizer = make_optimizer()
    rate = LearningRate(optimizer, lambda step: 1 / (step + 1))
    for step, expected in enumerate(([0.5, 0.25], [0.25, 0.125], [0.5 / 3, 0.25 / 3])):
        rate.set(step)
        assert rates_of(optimizer) == pytest.approx(expected, rel=1e-15)


def test_the_rate_depends_on_the_step_alone() -> None:
    # A resumed run sets step 7 first; a factor applied to the rate of the step before would drift.
    schedule = cosine(total=10, warmup=2)
    optimizer, resumed = make_optimizer(), make_optimizer()
    rate = LearningRate(optimizer, schedule)
    for step in range(8):
        rate.set(step)
    LearningRate(resumed, schedule).set(7)
    assert rates_of(optimizer) == rates_of(resumed) == [0.5 * schedule(7), 0.25 * schedule(7)]


def test_without_a_schedule_nothing_is_set() -> None:
    optimizer = make_optimizer()
    rate = LearningRate(optimizer, None)
    optimizer.param_groups[0]["lr"] = 2.0  # by the user, who keeps a schedule of their own
    rate.set(3)
    assert rates_of(optimizer) == [2.0, 0.25]


def test_the_rate_is_what_the_optimizer_uses() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    rate = LearningRate(optimizer, wsd(total=4, decay=4))
    factors = []
    for step in range(4):
        rate.set(step)
        before = weight.item()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        factors.append(before - weight.item())
    assert factors == pytest.approx([1.0, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5])


@pytest.mark.parametrize(
    ("schedule", "by_step", "match"),
    [(cosine(total=10), True, "both set the learning rate"), (None, False, "updates of several steps")],
)
def test_a_scheduler_of_torch_is_refused_where_it_would_not_be_heard(
    schedule: Factor | None, by_step: bool, match: str
) -> None:
    """The schedule overwrote the rates of the scheduler without a word."""
    optimizer = make_optimizer()
    rate = LearningRate(optimizer, schedule, by_step=by_step)
    rate.set(0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UserError, match=match):
        rate.set(0)


def test_a_scheduler_of_torch_alone_sets_the_rates() -> None:
    optimizer = make_optimizer()
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
    LearningRate(optimizer, None).set(3)
    assert rates_of(optimizer) == [0.25, 0.125]


def table(schedule: Schedule, steps: int) -> list[float]:
    return [round(schedule(step), 4) for step in range(steps)]


def test_constant() -> None:
    assert table(constant(), 3) == [1, 1, 1]
    assert table(constant(warmup=4), 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert constant()(10**12) == 1


def test_cosine() -> None:
    assert table(cosine(4, floor=0.0), 6) == [1, 0.8536, 0.5, 0.1464, 0, 0]
    assert table(cosine(6, warmup=2), 8) == [0.5, 1, 1, 0.8682, 0.55, 0.2318, 0.1, 0.1]


def test_cosine_of_warm_up_alone() -> None:
    assert table(cosine(2, warmup=2), 4) == [0.5, 1, 0.1, 0.1]


def test_wsd() -> None:
    assert table(wsd(9, warmup=2, decay=4), 11) == [0.5, 1, 1, 1, 1, 1, 0.5, 0.2929, 0.134, 0, 0]
    assert table(wsd(4, decay=4, floor=0.5), 5) == [1, 0.75, 0.6464, 0.567, 0.5]
    assert table(wsd(3, decay=0), 4) == [1, 1, 1, 0]


def test_wsd_decays_over_a_fifth_if_not_told() -> None:
    assert wsd(100).decay == 20
    assert wsd(100, warmup=95).decay == 5


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    total = draw(st.integers(1, 10**6))
    warmup = draw(st.integers(0, total))
    decay = draw(st.integers(0, total - warmup))
    floor = draw(st.floats(0, 1))
    return draw(
        st.sampled_from([constant(warmup), cosine(total, warmup, floor), wsd(total, warmup, decay, floor)])
    )


@settings(deadline=None)
@given(schedule=schedules(), step=st.integers(0, 2 * 10**6))
def test_factor_lies_between_0_and_1_and_turns_once(schedule: Schedule, step: int) -> None:
    now, after = schedule(step), schedule(step + 1)
    assert 0 <= now <= 1
    if step + 1 < schedule.warmup:
        assert now < after
    if step >= schedule.warmup:
        # Rounding at a decay that is all but flat may lift the last digit.
        assert after <= now + 1e-15


@settings(deadline=None)
@given(schedule=schedules())
def test_no_step_of_the_run_has_factor_0(schedule: Schedule) -> None:
    assert schedule(0) > 0
    if schedule.total is not None:
        assert schedule(schedule.total - 1) > 0
        assert schedule(schedule.total) == schedule.floor


def test_schedules_print_compare_and_pickle() -> None:
    schedule = cosine(100, warmup=10)
    assert repr(schedule) == "Schedule(name='cosine', total=100, warmup=10, decay=90, floor=0.1)"
    copy = pickle.loads(pickle.dumps(schedule))
    assert copy == schedule
    assert copy(50) == schedule(50)


def test_by_name() -> None:
    assert by_name("constant", 100, 10) == constant(10)
    assert by_name("cosine", 100, 10) == cosine(100, 10)
    assert by_name("cosine", 100, 10, floor=0.0) == cosine(100, 10, 0.0)
    assert by_name("wsd", 100, 10) == wsd(100, 10)
    assert by_name("wsd", 100, 10, decay=30, floor=0.2) == wsd(100, 10, 30, 0.2)


def errors_of(make: Any, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        make(*args, **kwargs)
    return caught.value.errors


def test_every_error_of_the_numbers_at_once() -> None:
    assert errors_of(wsd, 0, -1, 2.5, 1.5) == (
        "total=0: must be an integer, at least 1",
        "warmup=-1: must be an integer, at least 0",
        "decay=2.5: must be an integer, at least 0",
        "floor=1.5: must be between 0 and 1, a part of the full rate",
    )


def test_warm_up_as_a_fraction_is_refused() -> None:
    assert errors_of(constant, 0.1) == ("warmup=0.1: must be an integer, at least 0",)


def test_parts_longer_than_the_run() -> None:
    (error,) = errors_of(cosine, 10, 11)
    assert error == "warmup=11: more steps than total=10; lower them, or raise total"
    (error,) = errors_of(wsd, 10, 6, 5)
    assert error == "warmup=6 and decay=5: more steps than total=10; lower them, or raise total"


def test_unknown_name_comes_with_the_errors_of_the_numbers() -> None:
    errors = errors_of(by_name, "cosin", 10, 11, floor=float("nan"))
    assert errors[0] == "'cosin' is not known (did you mean 'cosine'?)"
    assert [error.split(":")[0] for error in errors[1:]] == ["warmup=11", "floor=nan"]


def test_options_that_the_schedule_does_not_have() -> None:
    errors = errors_of(by_name, "constant", 10, decay=2, floor=0.1)
    assert ["only wsd has it" in errors[0], "constant does not decay" in errors[1]] == [True, True]
    assert "only wsd has it" in errors_of(by_name, "cosine", 10, decay=2)[0]


def test_what_is_not_known_is_not_judged() -> None:
    assert schedule_errors(None, None, 5, 7, 0.5) == []
    assert schedule_errors("cosin", None, -1, None, None) == [
        "'cosin' is not known (did you mean 'cosine'?)",
        "warmup=-1: must be an integer, at least 0",
    ]


def test_schedules_of_one_step_and_of_exactly_their_parts() -> None:
    assert table(cosine(1), 2) == [1, 0.1]
    assert table(wsd(1), 2) == [1, 0]
    assert table(wsd(10, warmup=5, decay=5), 11) == [
        0.2,
        0.4,
        0.6,
        0.8,
        1,
        1,
        0.5528,
        0.3675,
        0.2254,
        0.1056,
        0,
    ]
    assert (cosine(1).warmup, wsd(5).warmup, constant().warmup, by_name("cosine", 5).warmup) == (0, 0, 0, 0)
    assert (cosine(4, floor=0.0).floor, cosine(4, floor=1.0).floor, wsd(4).floor) == (0, 1, 0)
    assert errors_of(cosine, 4, floor=-0.1) == errors_of(cosine, 4, 0, -0.1)
    assert by_name("wsd", 4, floor=0.5) == wsd(4, floor=0.5)
    assert by_name("wsd", 100).decay == 20
