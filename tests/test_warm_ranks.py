"""Ranks that tests share are as idle after a test as before it."""

import os
from collections.abc import Callable

import pytest
import torch.distributed as dist

from echelon.collectives.mesh import Mesh
from echelon.launching import Ranks
from echelon.plan import Plan


def leave_a_mesh_open() -> None:
    Mesh.join(Plan(data=2))


def leave_a_group_open() -> None:
    dist.new_group([0, 1])


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("leave_open", [leave_a_mesh_open, leave_a_group_open])
def test_what_a_test_leaves_open_is_closed(
    warm_ranks: Callable[[int], Ranks], leave_open: Callable[[], None]
) -> None:
    """Threads of groups that were left open piled up from test to test, and each wakes up all the time."""
    ranks = warm_ranks(2)
    ranks.run(leave_open)
    before = ranks.run(count_threads)
    for _ in range(3):
        ranks.run(leave_open)
    assert ranks.run(count_threads) == before
