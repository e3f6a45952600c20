"""Copies in memory are found again after faults: the newest that is whole, or none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.launching import Ranks
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
