"""The part of one rank in a save: rank 0 waits for the reports of all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.state.checkpoint import rank_save
from echelon.state.checkpoint.manifest import Manifest
from echelon.state.checkpoint.part_writer import lay_out
from echelon.state.checkpoint.rank_save import RankSave, SaveOptions, save_alone
from echelon.state.checkpoint.saved import SavedState
from echelon.state.ownership import Slice, whole_slice


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


TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4), "c": torch.tensor(1.5)}
ABOUT = Manifest(step=3, plan="data=1", ranks=1, saved="now", versions={})


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    reads: list[str] = []

    def read(box: Slice) -> Tensor:
        reads.append(box.name)
        return TENSORS[box.name]

    boxes = [(whole_slice(name, tensor), tensor.dtype) for name, tensor in TENSORS.items()]
    layouts = lay_out(0, boxes, limit=30)
    assert len(layouts) > 1
    save_alone(tmp_path / "out", ABOUT, {"steps": 3}, [(each, read) for each in layouts], SaveOptions())
    saved = SavedState.open(tmp_path / "out")
    saved.verify()
    assert (saved.manifest.step, saved.manifest.numbers) == (3, {"steps": 3})
    assert sorted(reads) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        out = torch.empty_like(tensor)
        saved.read(whole_slice(name, tensor), out)
        assert torch.equal(out, tensor)


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    def read(box: Slice) -> Tensor:
        raise UserError(f"{box.name}: is damaged")

    layouts = lay_out(0, [(whole_slice("a", TENSORS["a"]), torch.float32)])
    with pytest.raises(UserError, match="a: is damaged"):
        save_alone(tmp_path / "out", ABOUT, {}, [(layouts[0], read)], SaveOptions())
    assert list(tmp_path.iterdir()) == []
