"""Places in the data, with batches that are left out."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import UserError
from echelon.train import data_position
from echelon.train.data_position import DataPosition

RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)).map(lambda r: (r[0], r[0] + r[1])))


def test_without_a_rollback_step_and_batch_are_the_same() -> None:
    assert [DataPosition.after_steps(steps).next_batch for steps in range(4)] == [0, 1, 2, 3]


def test_the_picture_of_the_module() -> None:
    position = DataPosition.after_steps(2).skip(2, 5)
    assert position == DataPosition(5, ((2, 5),))
    trained = [DataPosition.after_steps(steps, position.skipped).next_batch for steps in range(5)]
    assert trained == [0, 1, 5, 6, 7]


@given(RANGES)
def test_every_batch_is_trained_once_or_left_out(ranges: list[tuple[int, int]]) -> None:
    left_out = {batch for begin, end in ranges for batch in range(begin, end)}
    trained = [DataPosition.after_steps(steps, ranges).next_batch for steps in range(20)]
    assert trained == [batch for batch in range(200) if batch not in left_out][:20]


def test_ranges_of_a_stranger_are_united_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each of them would take hours for those that fit into a manifest."""
    united, calls = data_position._united, list[int]()
    monkeypatch.setattr(data_position, "_united", lambda ranges: calls.append(1) or united(ranges))
    skipped = tuple((2 * number, 2 * number + 1) for number in range(1000))
    position = DataPosition.after_steps(1000, skipped[:500])
    assert position.with_others(1000, skipped[400:500]) == position
    assert DataPosition(0, ()).with_others(0, skipped) == DataPosition(1, skipped)
    assert len(calls) == 3


@given(RANGES, st.integers(0, 30), st.integers(1, 5))
def test_what_is_left_out_adds_up(ranges: list[tuple[int, int]], begin: int, size: int) -> None:
    position = DataPosition.after_steps(7, ranges).skip(begin, begin + size)
    assert position.skipped == DataPosition.after_steps(0, [*ranges, (begin, begin + size)]).skipped
    assert not any(start <= position.next_batch < end for start, end in position.skipped)
    assert DataPosition.parse(position.as_plain()) == position


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"next_batch": 3},
        {"next_batch": -1, "skipped": []},
        {"next_batch": True, "skipped": []},
        {"next_batch": 2**63, "skipped": []},
        {"next_batch": 1.5, "skipped": []},
        {"next_batch": 3, "skipped": None},
        {"next_batch": 3, "skipped": [[1]]},
        {"next_batch": 3, "skipped": [[2, 1]]},
        {"next_batch": 3, "skipped": [[1, "2"]]},
        {"next_batch": 3, "skipped": [[5, 6], [1, 2]]},
        {"next_batch": 3, "skipped": [[1, 3], [2, 4]]},
    ],
)
def test_what_no_training_has_saved_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match="the position in the data must have next_batch"):
        DataPosition.parse(value)
