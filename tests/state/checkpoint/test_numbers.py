"""Counters of steps go from one kind of training to another."""

from echelon.state.checkpoint import number_errors, numbers_of

TOGETHER = {"begun steps": 7, "steps": 6, "skipped steps": 1, "seed": 3, "loss scale": 8.0}
WORKERS = {
    "version": 9,
    "seed": 3,
    "begun steps of worker 0": 5,
    "steps of worker 0": 5,
    "loss scale of worker 0": 4.0,
    "begun steps of worker 1": 4,
    "steps of worker 1": 4,
    "loss scale of worker 1": 2.0,
}


def test_ranks_that_step_together_go_on_together() -> None:
    assert numbers_of(TOGETHER, None, 0) == {**TOGETHER, "version": 7}


def test_workers_begin_at_the_step_of_ranks_that_stepped_together() -> None:
    assert numbers_of(TOGETHER, 1, 2) == {**TOGETHER, "version": 7}


def test_as_many_workers_go_on_where_each_was() -> None:
    own = numbers_of(WORKERS, 1, 2)
    assert own == {"version": 9, "seed": 3, "begun steps": 4, "steps": 4, "loss scale": 2.0}


def test_other_workers_or_ranks_begin_at_the_number_of_updates() -> None:
    for worker, workers in ((None, 0), (2, 3)):
        found = numbers_of(WORKERS, worker, workers)
        assert (found["begun steps"], found["steps"], found["version"]) == (9, 9, 9)


def test_numbers_that_are_missing_are_named() -> None:
    together = {**TOGETHER, "good steps": 1}
    workers = {**WORKERS, "good steps of worker 0": 1, "good steps of worker 1": 1}
    needed = {
        "begun steps": together,
        "steps": together,
        "good steps": together,
        "version": workers,
        "steps of worker 1": workers,
        "begun steps of worker 0": workers,
        "good steps of worker 1": workers,
    }
    for name, numbers in needed.items():
        assert number_errors(numbers) == []
        left = {key: value for key, value in numbers.items() if key != name}
        assert any(f"'{name}'" in error for error in number_errors(left)), name
