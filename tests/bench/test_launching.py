import pytest

from echelon.bench import launching


def test_a_fresh_process_pays_for_its_fork_server() -> None:
    launching.warm_seconds(1)  # here the fork server is paid for from now on
    assert launching.cold_seconds(1) > launching.warm_seconds(1) > 0


def test_each_number_of_ranks_is_a_contender_warm_and_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "cold_seconds", float)  # as many seconds as ranks

    settings, rows = launching.bench(quick=True)

    assert settings == {"ranks": [1, 2], "warm_rounds": 2, "cold_rounds": 1}
    assert [(row.case[:4], row.contender) for row in rows] == [
        ("fork", "1 rank"),
        ("fork", "2 ranks"),
        ("fres", "1 rank"),
        ("fres", "2 ranks"),
    ]
    assert {row.baseline for row in rows} == {"1 rank"}
    assert rows[-1].ratio.median == 2.0
