"""The part of one rank in a save: rank 0 waits for the reports of all."""

from typing import Any

import pytest

from echelon.state.checkpoint import rank_save
from echelon.state.checkpoint.rank_save import RankSave, SaveOptions


def test_rank_0_asks_for_reports_in_order_fifty_times_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {0: [None, {"rank": 0}], 1: [None, None, {"rank": 1}]}
    pauses, committed = [], list[Any]()

    class Waiting:
        place = "a"
        target = type("T", (), {"find_report": staticmethod(lambda rank: found[rank].pop(0))})
        _group = type("G", (), {"rank": 0, "size": 2})
        _options = SaveOptions(retries=0)
        commit = staticmethod(committed.append)

    monkeypatch.setattr(rank_save.time, "sleep", pauses.append)
    waiting: Any = Waiting()
    RankSave.commit_when_all_are_done(waiting, lambda: False)
    assert (pauses, committed) == ([0.02] * 3, [[{"rank": 0}, {"rank": 1}]])
    with pytest.raises(rank_save.StoppedError):
        RankSave.commit_when_all_are_done(waiting, lambda: True)
    Waiting._group.rank = 1  # type: ignore[attr-defined]
    RankSave.commit_when_all_are_done(waiting, lambda: True)
    assert len(committed) == 1
