"""As many ranks as the plan has: on this machine, or under torchrun."""

import os

import pytest

from echelon.plan import Plan
from echelon.train.jobs.rank_fit import RANKS_PER_CORE, rank_error, ranks_on_this_host


def test_too_many_ranks_for_this_machine() -> None:
    most = RANKS_PER_CORE * (os.cpu_count() or 1)
    assert rank_error(Plan(data=most)) is None
    assert f"needs {most + 1} ranks, but this machine" in str(rank_error(Plan(data=most + 1)))
    assert rank_error(Plan.parse("pipeline=auto")) is None


def test_torchrun_must_have_started_the_plans_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every rank started, and said so with a traceback of its own.
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_error(Plan(data=4)) is None
    assert rank_error(Plan(data=2)) == (
        "plan 'data=2': needs 2 ranks, but torchrun started 4; start torchrun with 2 processes in total, or "
        "change the plan"
    )
    assert rank_error(Plan(data=6, pipeline=2)) == (
        "plan 'data=6 pipeline=2': needs 12 ranks, but torchrun started 4; start torchrun with 12 processes "
        "in total, or change the plan; or add --elastic, which trains with data=2 and the same global batch"
    )
    assert "--elastic" not in (rank_error(Plan(data=6, pipeline=3)) or ""), "4 ranks are no 3 stages"
    assert rank_error(Plan.parse("pipeline=auto data=2")) is None
    assert "start a multiple of 3" in str(rank_error(Plan.parse("pipeline=auto data=3")))


def test_the_ranks_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks_on_this_host(8) == 8
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_on_this_host(8) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks_on_this_host(8) == 4
