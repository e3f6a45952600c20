"""Schedules against literal tables, and their bounds for any numbers."""

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import UserError
from echelon.update.optim import Schedule, by_name, constant, cosine, wsd
from echelon.update.optim.schedules import schedule_errors


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
