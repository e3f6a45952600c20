from collections.abc import Callable
from typing import Any

import pytest
import torch

from echelon.cli.doctor import speed
from echelon.errors import UserError
from echelon.launching import RankFailed, Ranks


def test_ranks_time_a_large_and_a_small_all_reduce(warm_ranks: Callable[[int], Ranks]) -> None:
    for seconds in warm_ranks(2).run(speed.time_all_reduce):
        assert seconds.large > seconds.small > 0


@pytest.mark.slow_cases("error1")
@pytest.mark.parametrize("error", [RankFailed(1, "was killed", "a traceback"), UserError("no ranks here")])
def test_ranks_that_do_not_start_are_a_warning(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Ranks:
        raise error

    monkeypatch.setattr(speed, "Ranks", refuse)

    finding = speed.examine_speed().findings[-1]

    assert (finding.name, finding.value, finding.status) == ("launch of 2 ranks", "fails", "warn")
    assert str(error).splitlines()[0] in finding.remark
    assert "a traceback" not in finding.remark


def test_measuring_leaves_the_number_of_threads_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_two_ranks", list)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        findings = speed.examine_speed().findings
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

    assert [finding.status for finding in findings] == ["ok", "ok"]
    assert all(finding.number for finding in findings)
