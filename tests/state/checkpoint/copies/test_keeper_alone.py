"""Copies in memory of one rank, without ranks: which generation is kept, found, refused and let go."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.collectives import RecordingGroup
from echelon.errors import UserError
from echelon.state.checkpoint.copies import folder
from echelon.state.checkpoint.copies.folder import MemoryFolder
from echelon.state.checkpoint.copies.keeper import MemoryCopies, _Attempt
from echelon.state.checkpoint.manifest import Manifest, OtherVersionError
from echelon.state.ownership import ENGINE, OwnedSlice, Slice, whole_slice

PLAN = "data=1"


class Copies:
    """Of one weight, whose values are the step."""

    def __init__(self, path: Path) -> None:
        self.folder = MemoryFolder(path / "run", path)
        self.folder.make(os.getpid())
        self.copies = self.again()

    def again(self, plan: str = PLAN) -> MemoryCopies:
        return MemoryCopies(self.folder, plan, RecordingGroup("all"), torch.device("cpu"))

    def save(self, step: int, size: int = 3) -> None:
        weight = torch.full((size,), float(step))
        steps = OwnedSlice(Slice(ENGINE, "begun steps", (), (), ()), torch.tensor(step))
        owned = [OwnedSlice(whole_slice("w", weight), weight), steps]
        self.copies.save(step, owned, Manifest(step, PLAN, 1, "2030", {}, extra={"at": step}))

    def held(self) -> list[int]:
        return sorted(int(entry.generation.partition("-")[0]) for entry in self.folder.entries())


def value_of(found: Any) -> float:
    out = torch.empty(3)
    found.saved.read(whole_slice("w", out), out)
    return out[0].item()


def test_the_last_two_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    each = Copies(tmp_path)
    for step in (1, 2, 3):
        each.save(step)
        each.copies.finish()
    assert each.held() == [2, 3]
    assert each.copies.steps() == [3, 2]
    said: list[str] = []
    found = each.again().find(said.append)
    assert found is not None
    assert (found.step, found.received, value_of(found), found.saved.manifest.extra) == (
        3,
        (),
        3.0,
        {"at": 3},
    )
    before = each.again().find(said.append, before=3)
    assert before is not None
    assert (before.step, value_of(before)) == (2, 2.0)
    assert each.again().find(said.append, before=2) is None
    assert said == []


def test_memory_is_that_of_the_copy_before_the_last(tmp_path: Path) -> None:
    each = Copies(tmp_path)
    for step in (1, 2):
        each.save(step)
    each.copies.finish()
    files = dict(each.copies._files)
    each.save(3)
    each.copies.finish()
    assert each.copies._files == files, "nothing new is mapped"
    each.save(4, size=500)
    each.copies.finish()
    sizes = sorted(file.size for file in each.copies._files.values())
    assert sizes[0] < sizes[1], "another size is another file"
    found = each.again().find(print)
    assert found is not None
    assert found.step == 4


def test_a_damaged_copy_is_said_and_the_one_before_is_found(tmp_path: Path) -> None:
    each = Copies(tmp_path)
    for step in (1, 2):
        each.save(step)
    each.copies.finish()
    (slot,) = [entry.slot for entry in each.folder.entries() if entry.generation.startswith("00000002")]
    file = each.folder.file(slot, 0)
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    said: list[str] = []
    found = each.again().find(said.append)
    assert found is not None
    assert (found.step, value_of(found), len(said), each.held()) == (1, 1.0, 1, [1])
    assert "is damaged" in said[0]


def test_copies_of_another_plan_are_passed_over_and_stay(tmp_path: Path) -> None:
    each = Copies(tmp_path)
    for step in (1, 2):
        each.save(step)
    each.copies.finish()
    said: list[str] = []
    assert each.again("data=1 zero=1").find(said.append) is None
    assert (len(said), each.held()) == (2, [1, 2])


def test_only_what_training_goes_on_from_stays(tmp_path: Path) -> None:
    each = Copies(tmp_path)
    for step in (1, 2):
        each.save(step)
    each.copies.finish()
    again = each.again()
    found = again.find(print, before=2)
    again.keep_only(found)
    assert each.held() == [1]
    each.copies = again
    each.save(5)
    each.copies.finish()
    assert each.held() == [1, 5], "the one that it began with is not written over"
    again.keep_only(None)
    assert each.held() == []


def test_each_error_is_said_once_and_other_plans_by_the_first_rank(tmp_path: Path) -> None:
    copies, said, given_up = Copies(tmp_path).copies, list[str](), set[str]()

    def refused(*errors: tuple[str, str]) -> bool:
        said.clear()
        given_up.clear()
        attempt = _Attempt()
        attempt.errors = [list(error) for error in errors]
        return copies._is_refused("g", attempt, given_up, said.append)

    assert (refused(), said, given_up) == (False, [], set())
    assert (refused(("a", "damaged"), ("a", "damaged"), ("b", "damaged")), said) == (True, ["a", "b"])
    assert given_up == set()
    assert (refused(("p", "other plan"), ("q", "other plan"), ("d", "damaged")), said) == (True, ["p", "d"])
    assert given_up == {"g"}
    with pytest.raises(OtherVersionError, match="v"):
        refused(("a", "damaged"), ("v", "other version"))


def test_an_error_of_the_thread_is_raised_and_that_copy_is_not_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = Copies(tmp_path)
    each.save(1)
    each.copies.finish()
    threads: list[threading.Thread] = []

    def fail(*_: object) -> None:
        threads.append(threading.current_thread())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "write_small", fail)
        each.save(2)
        with pytest.raises(UserError, match=r"cannot be written: No space left on device; keep=2 is for"):
            each.copies.finish()
    assert [(thread.name, thread.daemon) for thread in threads] == [("echelon-memory-copy", True)]
    each.copies.finish()  # the error is told once
    each.save(3)
    each.copies.finish()
    assert each.held() == [1, 3], "the first was the newest whole one"


def test_room_for_two_copies_of_each_rank(tmp_path: Path) -> None:
    copies = Copies(tmp_path).copies
    copies.check_room(10.0)
    with pytest.raises(UserError, match=r"1 states of 1024.0 TiB are kept twice"):
        copies.check_room(2.0**50)
    assert (copies._receivers, copies._network) == ([None], None)
