import pytest

from benchmarks import launching
from echelon.launching import launch


@pytest.mark.slow
def test_launches_are_timed_here_and_in_a_fresh_process() -> None:
    assert launching.warm_seconds(1) > 0
    assert launching.first_seconds(1) > 0


def test_ranks_that_train_take_a_step_together() -> None:
    losses = launch(launching.train_one_step, 2, 2)
    assert losses[0] == losses[1] > 0


def test_each_number_of_ranks_is_a_contender_in_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    for measure in ("warm_seconds", "training_seconds", "first_seconds"):
        monkeypatch.setattr(launching, measure, float)  # as many seconds as ranks

    settings, rows = launching.bench(quick=True)

    assert settings == {
        "ranks": [1, 2],
        "training_ranks": [1, 2],
        "warm_rounds": 2,
        "training_rounds": 1,
        "first_rounds": 1,
    }
    cases = [
        "fork server warm",
        "fork server warm, parallelize and one step",
        "fresh process, torch imported",
    ]
    assert [(row.case, row.contender) for row in rows] == [
        (case, contender) for case in cases for contender in ("1 rank", "2 ranks")
    ]
    assert {row.baseline for row in rows} == {"1 rank"}
    assert all(row.ratio.median == row.seconds.median == float(row.contender[0]) for row in rows)


def test_the_full_bench_trains_on_2_and_on_32_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for measure in ("warm_seconds", "training_seconds", "first_seconds"):
        monkeypatch.setattr(launching, measure, float)

    _, rows = launching.bench(quick=False)

    training = [row.contender for row in rows if row.case.endswith("one step")]
    assert training == ["2 ranks", "32 ranks"]
