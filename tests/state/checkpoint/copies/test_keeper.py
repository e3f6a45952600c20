"""Copies in memory are found again after faults: the newest that is whole, or none."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.state.checkpoint.copies import keeper
from echelon.state.checkpoint.copies.keeper import RankCopy, receive, send
from echelon.state.checkpoint.manifest import MOST_BYTES
from tests.state.checkpoint.copies.kept import recover, save_where_rank_1_cannot_write

WarmRanks = Callable[[int], Ranks]
Result = tuple[list[str], int, list[int]]


def run(ranks: Ranks, folder: Path, hosts: int, *faults: str, plan: str | None = None) -> Result:
    """What rank 0 says and finds; rank 1 must find the same."""
    arguments = (str(folder), hosts, list(faults), *([] if plan is None else [plan]))
    first, second = ranks.run(recover, *arguments)
    assert first == second
    return first[0], first[1], first[2]


def test_a_host_that_is_lost_gets_its_state_from_the_other(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    assert run(warm_ranks(2), tmp_path, 2, "host 1 is lost") == ([], 2, [1])


def test_a_damaged_file_is_passed_over(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    said, step, received = run(warm_ranks(2), tmp_path, 1, "file of rank 1 is damaged, on one host")
    assert (step, received) == (1, []), "the generation before"
    (damaged,) = said
    assert "rank-00001.safetensors: is damaged: its hash is" in damaged


def test_copies_of_another_version_are_refused_by_all_ranks(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    said, step, _ = run(warm_ranks(2), tmp_path, 2, "copies of host 1 are of another version")
    assert step == -1
    assert "is of version 1; this echelon reads version 2" in said[0]
    assert len(list(tmp_path.glob("host-1/*/*/*.json"))) == 4, "nothing is forgotten"


@pytest.mark.slow
def test_a_host_that_cannot_write_tells_its_neighbour(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    (told,) = set(warm_ranks(2).run(save_where_rank_1_cannot_write, str(tmp_path)))
    assert told == "rank 1 could not make its copy in memory, and sends none"


@pytest.mark.slow
def test_a_damaged_file_comes_from_the_other_host(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    said, step, received = run(warm_ranks(2), tmp_path, 2, "file of rank 1 is damaged")
    assert (step, received) == (2, [1])
    (damaged,) = said
    assert "is damaged" in damaged


@pytest.mark.slow
def test_a_damaged_copy_is_not_used(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    faults = ("file of rank 1 is damaged", "copy of rank 1 is damaged")
    said, step, received = run(warm_ranks(2), tmp_path, 2, *faults)
    assert (step, received) == (1, [])
    assert ["is damaged" in each for each in said] == [True, True]


@pytest.mark.slow
def test_copies_of_another_plan_are_not_used(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    said, step, _ = run(warm_ranks(2), tmp_path, 1, plan="data=2 zero=2 precision=bf16")
    assert step == 0
    assert said[0].startswith("the copies of step 2 in memory are of the plan 'data=2 zero=1")


GROUP: Any = "the group"


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What is under way; pieces have 4 bytes."""
    waiting: list[Tensor] = []

    def isend(part: Tensor, to: int, group: object) -> object:
        assert (to, group) == (3, GROUP)
        waiting.append(part.clone())
        return part.numel()  # in the place of a work

    def recv(out: Tensor, source: int, group: object) -> None:
        assert (source, group) == (2, GROUP)
        part = waiting.pop(0)
        assert (out.shape, out.dtype) == (part.shape, part.dtype)
        out.copy_(part)

    monkeypatch.setattr(keeper, "dist", SimpleNamespace(isend=isend, recv=recv))
    monkeypatch.setattr(keeper, "PIECE_BYTES", 4)
    return waiting


def copy_of(num_bytes: int) -> RankCopy:
    return RankCopy(torch.arange(5, dtype=torch.uint8), torch.arange(num_bytes, dtype=torch.uint8))


@pytest.mark.parametrize(("num_bytes", "pieces"), [(1, [1]), (4, [4]), (9, [4, 4, 1])])
def test_a_file_goes_in_pieces_to_where_it_will_be(
    messages: list[Tensor], num_bytes: int, pieces: list[int]
) -> None:
    assert send(copy_of(num_bytes), 3, GROUP) == [2, 5, *pieces]
    rooms: list[Tensor] = []

    def make_room(size: int) -> Tensor:
        rooms.append(torch.full((size,), 255, dtype=torch.uint8))
        return rooms[-1]

    found = receive(make_room, 2, GROUP)
    assert found.file is rooms[0]
    assert all(torch.equal(*pair) for pair in zip(found, copy_of(num_bytes), strict=True))
    assert not messages


def test_a_rank_without_a_copy_says_so(messages: list[Tensor]) -> None:
    assert send(None, 3, GROUP) == [2]
    with pytest.raises(UserError, match="rank 2 could not make its copy in memory, and sends none"):
        receive(torch.empty, 2, GROUP)
    assert not messages


@pytest.mark.parametrize("num_bytes", [4, 9])
def test_a_file_without_room_is_received_all_the_same(messages: list[Tensor], num_bytes: int) -> None:
    """Else its sender would wait."""

    def refuse(size: int) -> Tensor:
        raise UserError(f"no room for {size}")

    send(copy_of(num_bytes), 3, GROUP)
    with pytest.raises(UserError, match=f"no room for {num_bytes}"):
        receive(refuse, 2, GROUP)
    assert not messages


@pytest.mark.parametrize(
    ("manifest_bytes", "file_bytes"),
    [(0, 1), (1, 0), (-1, 1), (1, -1), (MOST_BYTES + 1, 1), (1, 2**50 + 1)],
)
def test_sizes_that_no_rank_has(messages: list[Tensor], manifest_bytes: int, file_bytes: int) -> None:
    messages.append(torch.tensor([manifest_bytes, file_bytes]))
    with pytest.raises(UserError, match=f"rank 2 sends a copy of {file_bytes} bytes, which no rank has"):
        receive(torch.empty, 2, GROUP)


@pytest.mark.parametrize(("manifest_bytes", "file_bytes"), [(1, 1), (1, 2**50)])
def test_the_smallest_and_the_largest_file(
    messages: list[Tensor], manifest_bytes: int, file_bytes: int
) -> None:
    messages += [torch.tensor([manifest_bytes, file_bytes]), torch.zeros(manifest_bytes, dtype=torch.uint8)]
    asked = []

    def stop(size: int) -> Tensor:
        asked.append(size)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        receive(stop, 2, GROUP)
    assert asked == [file_bytes]


def test_a_message_without_a_work_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "dist", SimpleNamespace(isend=lambda *_: None))
    assert (send(copy_of(9), 3, GROUP), send(None, 3, GROUP)) == ([], [])


def test_a_piece_has_64_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which a receiver drops one at a time; here without memory."""
    monkeypatch.setattr(keeper, "dist", SimpleNamespace(isend=lambda part, *_: part.numel()))
    large = copy_of(9)._replace(file=torch.empty(2**26 + 1, dtype=torch.uint8, device="meta"))
    works: list[Any] = send(large, 3, GROUP)
    assert works == [2, 5, 2**26, 1]
