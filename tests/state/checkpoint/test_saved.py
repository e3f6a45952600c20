"""Ranks that open a checkpoint together: each file is hashed once, and all raise what one of them finds."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import echelon.state.checkpoint.saved
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.state.checkpoint.file_checks import check_hash, share_files
from echelon.state.checkpoint.manifest import FileRecord
from echelon.state.checkpoint.saved import number_errors, numbers_of, open_whole
from tests.state.checkpoint.small import FILES, write_small

Warm = Callable[[int], Ranks]


def _open(path: Path) -> tuple[str, list[str]]:
    """What a rank is told, and the files that it has hashed."""
    hashed: list[str] = []

    def noting(file: Path, record: FileRecord) -> None:
        hashed.append(file.name)
        check_hash(file, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(echelon.state.checkpoint.file_checks, "check_hash", noting)
        try:
            open_whole(path)
        except UserError as error:
            return str(error), hashed
    return "", hashed


def test_every_file_is_hashed_once_and_all_ranks_hear_of_damage(tmp_path: Path, warm_ranks: Warm) -> None:
    write_small(tmp_path / "a")
    ranks = warm_ranks(4)
    opened = ranks.run(_open, tmp_path / "a")
    assert sorted(name for _, hashed in opened for name in hashed) == sorted(FILES)
    assert {error for error, _ in opened} == {""}
    data = bytearray((tmp_path / "a" / FILES[1]).read_bytes())
    data[-1] ^= 1
    (tmp_path / "a" / FILES[1]).write_bytes(data)
    (error,) = {error for error, _ in ranks.run(_open, tmp_path / "a")}
    assert f"{tmp_path / 'a' / FILES[1]}: is damaged" in error


def _open_own(folder: Path) -> str:
    return _open(folder if dist.get_rank() == 0 else folder / "other")[0]


def test_ranks_that_find_different_checkpoints_are_refused(tmp_path: Path, warm_ranks: Warm) -> None:
    write_small(tmp_path / "a", step=3)
    write_small(tmp_path / "a" / "other", step=4)
    (error,) = set(warm_ranks(4).run(_open_own, tmp_path / "a"))
    assert "finds another checkpoint there than rank 0" in error


def test_shares_are_about_equal() -> None:
    assert share_files({"a": 5, "b": 3, "c": 2, "d": 1}, 2) == [["a", "d"], ["b", "c"]]
    assert share_files({"a": 5}, 3) == [["a"], [], []]


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
