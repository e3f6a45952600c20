"""Under the same plan a rank's own file in memory is all that it needs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.state.checkpoint.copies.folder import MemoryFolder
from echelon.state.checkpoint.copies.rank_file import HostCopies
from echelon.state.checkpoint.folder import CheckpointFolder
from echelon.state.checkpoint.saved import SavedState
from echelon.state.ownership import Slice
from tests.engine.saving.test_engine_state import FEW, ONE_RANK, TWO_RANKS, Training
from tests.state.checkpoint.copies.host_files import PLAN, make_other_version, tensors, write_copies
from tests.state.checkpoint.copies.kept import differences_from_memory, differences_on_disk

WarmRanks = Callable[[int], Ranks]

OWNERS = [each for each in TWO_RANKS if "sync=" not in each.plan]  # a job with a server is refused

FOUR_RANKS = [
    Training("tensor=2 pipeline=2 precision=bf16"),
    Training("data=2 tensor=2 zero=1 precision=bf16"),
    Training("data=4 zero=3 precision=bf16"),
    Training("data=4 zero=3 shard=2 precision=fp32"),
    Training("expert=2 data=4 precision=fp32", gate="sigmoid"),
    Training("context=2 data=2 precision=bf16"),
]


def check(found: list[dict[str, list[str]]], trainings: list[Training]) -> None:
    for of_rank in found:
        assert len(of_rank) == len(trainings)
        assert not any(of_rank.values()), {name: keys for name, keys in of_rank.items() if keys}


def test_ranks_of_two_hosts_go_on_in_every_bit(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    check(warm_ranks(2).run(differences_from_memory, FEW[:1], str(tmp_path), 2), FEW[:1])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "trainings"), [(1, ONE_RANK), (2, OWNERS), (4, FOUR_RANKS)])
def test_every_plan_goes_on_in_every_bit(
    warm_ranks: WarmRanks, tmp_path: Path, ranks: int, trainings: list[Training]
) -> None:
    check(warm_ranks(ranks).run(differences_from_memory, trainings, str(tmp_path), ranks), trainings)


def newest(folder: MemoryFolder, after: int = 0) -> tuple[HostCopies | None, list[str]]:
    said: list[str] = []
    return HostCopies.newest(folder, after, said.append), said


def make_folder(path: Path) -> MemoryFolder:
    return MemoryFolder(path / "run", path)


def test_a_checkpoint_has_every_slice_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    write_copies(folder, 7)
    copies, said = newest(folder)
    assert (copies and (copies.step, copies.plan), said) == ((7, PLAN), [])
    assert copies is not None
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    checkpoints.save(copies, copies.step, copies.extra, wait=True)
    saved = SavedState.open(tmp_path / "checkpoints" / "step-00000007")
    saved.verify()
    for name, expected in tensors(7).items():
        out = torch.empty_like(expected)
        saved.read(Slice(name, "value", tuple(out.shape), (0,) * out.dim(), tuple(out.shape)), out)
        assert torch.equal(out, expected)
    assert (saved.manifest.numbers, saved.manifest.extra) == ({"begun steps": 7}, {"step": 7})
    assert {path.name for path in checkpoints_in(tmp_path)} == {"latest", "step-00000007"}
    copies.save(tmp_path / "by itself")
    again = SavedState.open(tmp_path / "by itself").manifest
    assert (again.tensors.keys(), again.numbers, again.extra) == (
        saved.manifest.tensors.keys(),
        saved.manifest.numbers,
        {},
    )


def checkpoints_in(path: Path) -> list[Path]:
    return list((path / "checkpoints").iterdir())


def test_copies_of_some_ranks_alone_or_from_before_the_disk_are_none(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    write_copies(folder, 7, ranks=(1,))
    assert newest(folder) == (None, [])
    write_copies(folder, 8)
    assert newest(folder, after=8) == (None, [])


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    write_copies(folder, 7)
    path = folder.file(0, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    copies, (text,) = newest(folder)
    assert copies is None
    assert text.startswith(f"{path}: is damaged")


def test_copies_of_another_version_are_an_error_and_stay(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    write_copies(folder, 7)
    make_other_version(folder)
    with pytest.raises(UserError, match=rf"is of version 1; .*\n.*or remove {folder.path} to go on without"):
        newest(folder)
    assert len(folder.entries()) == 2


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    write_copies(folder, 7)
    copies, _ = newest(folder)
    assert copies is not None
    folder.file(0, 1).unlink()
    with pytest.raises(UserError, match="rank-00001"):
        CheckpointFolder(tmp_path / "checkpoints").save(copies, 7, {}, wait=True)
    assert checkpoints_in(tmp_path) == []


def test_ranks_go_on_from_it_in_every_bit(warm_ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    check(warm_ranks(2).run(differences_on_disk, FEW[:1], str(tmp_path)), FEW[:1])


@pytest.mark.slow
def test_so_do_those_of_every_plan(warm_ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    check(warm_ranks(4).run(differences_on_disk, FOUR_RANKS, str(tmp_path)), FOUR_RANKS)
