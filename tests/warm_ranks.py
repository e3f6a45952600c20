"""Ranks that run one test after the other: what a test leaves open in them is closed before the next.

Each process group has a thread that wakes up a hundred times per second. Hundreds of groups that tests have
left open would slow down every later test.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch.distributed as dist

from echelon.collectives.mesh import Mesh
from echelon.launching import Ranks
from echelon.plan import Plan

T = TypeVar("T")


class WarmRanks(Ranks):
    """As Ranks, but every mesh and process group that a run leaves open is closed at its end."""

    def run(self, fn: Callable[..., T], *args: object, **options: Any) -> list[T]:
        return super().run(partial(run_and_close, fn), *args, **options)


def run_and_close(fn: Callable[..., T], *args: object) -> T:
    """Call `fn` in a rank, and when all ranks have returned from it, close what it has opened."""
    before = _process_groups()
    with joined_meshes() as meshes:
        result = fn(*args)
    if dist.is_initialized():
        dist.barrier()
    for mesh in meshes:
        mesh.close()
    for group in _process_groups() - before:
        dist.destroy_process_group(group)
    return result


@contextmanager
def joined_meshes() -> Iterator[list[Mesh]]:
    """The meshes that are joined inside."""
    meshes: list[Mesh] = []
    join = Mesh.join

    def join_and_remember(plan: Plan) -> Mesh:
        meshes.append(join(plan))
        return meshes[-1]

    with patch.object(Mesh, "join", join_and_remember):
        yield meshes


def _process_groups() -> set[dist.ProcessGroup]:
    """Those in torch's table, which has the world too."""
    return set(dist.distributed_c10d._world.pg_map)
