"""Ranks of torchrun that hang, raise, die, or only take long, as their watchdogs see them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

SCRIPT = Path(__file__).parents[1] / "scripts" / "hanging.py"


def run(way: str, ranks: int = 2, deadline: str = "3") -> tuple[int, str]:
    """The exit code of torchrun, and what all its ranks printed."""
    options = (f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), way],
        env=os.environ | {"ECHELON_DEADLINE": deadline, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    return ran.returncode, ran.stdout


def reports(printed: str, ranks: int) -> list[str]:
    """The report of each rank, without who it is: each has printed one."""
    found = []
    for rank in range(ranks):
        name = f"^echelon, rank {rank}: "
        (report,) = re.findall(f"{name}(rank .*?){name}ends", printed, re.MULTILINE | re.DOTALL)
        found.append(report)
    return found


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_by_all() -> None:
    code, printed = run("sleep_before_a_collective", ranks=3)
    assert code != 0
    for report in reports(printed, 3):
        assert report.startswith("rank 1 seems to block the others: it works outside any operation, after ")
        assert "  ranks 0, 2, each: waits in all_reduce data (operation " in report
        assert "in sleep_before_a_collective\n    time.sleep(600)" in report, "the stack of rank 1"


@pytest.mark.slow
def test_a_rank_in_another_branch_is_named() -> None:
    code, printed = run("take_another_branch", ranks=3)
    assert code != 0
    for report in reports(printed, 3):
        assert report.startswith("rank 1 is in another operation than others: it waits in barrier data")


@pytest.mark.slow
def test_a_rank_that_sleeps_in_a_pipeline_is_named_with_step_and_microbatch() -> None:
    code, printed = run("sleep_in_a_pipeline")
    assert code != 0
    for report in reports(printed, 2):
        waits = "  rank 0 is in step 2, at RG0 of stage 0, microbatch 0, waits in recv pipeline (operation "
        assert waits in report
        assert "  rank 1 is in step 2, at F0 of stage 1, microbatch 0, works outside any operation" in report


@pytest.mark.slow
def test_an_error_of_one_rank_ends_the_others_long_before_the_deadline() -> None:
    code, printed = run("raise_an_error", deadline="10000")
    assert code != 0
    assert "echelon, rank 0: rank 1 raised ValueError: the learning rate went for a walk\n" in printed
    assert re.search(r"Root Cause.*?rank +: 1 ", printed, re.S), "torchrun names the rank that raised"


@pytest.mark.slow
def test_an_error_of_all_ranks_is_reported_by_each_of_them_alone() -> None:
    code, printed = run("raise_on_all_ranks", ranks=3, deadline="10000")
    assert code != 0
    assert "echelon, rank" not in printed
    assert "ValueError: all ranks see that the batch is empty" in printed


@pytest.mark.slow
@pytest.mark.parametrize("way", ["die", "end_early"])
def test_a_rank_that_is_gone_ends_the_others_long_before_the_deadline(way: str) -> None:
    code, printed = run(way, deadline="10000")
    assert code != 0
    assert "is done" not in printed


@pytest.mark.slow
def test_a_rank_that_gives_signs_of_life_and_ranks_that_wait_for_nobody_go_on() -> None:
    code, printed = run("work_slowly", deadline="2")
    assert code == 0, printed
    assert sorted(re.findall(r"rank \d is done", printed)) == ["rank 0 is done", "rank 1 is done"]


@pytest.mark.slow
def test_a_deadline_that_means_nothing_is_refused() -> None:
    code, printed = run("work_slowly", deadline="soon")
    assert code != 0
    assert "ECHELON_DEADLINE='soon' in the environment: must be more than 0 seconds, or none" in printed
