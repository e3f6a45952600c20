"""The mesh of a plan over an NcclWorld: which groups there are, and how they are made, is the real mesh's."""

from collections.abc import Collection
from functools import lru_cache
from typing import final

from echelon.collectives import Group, Ledger
from echelon.collectives.layout import Layout
from echelon.collectives.mesh import Mesh
from echelon.plan import Plan
from tests.nccl_like.group import CPU
from tests.nccl_like.world import NcclWorld


@final
class NcclMesh(Mesh):
    """Rank `rank` of a plan."""

    def __init__(self, world: NcclWorld, plan: Plan, rank: int) -> None:
        ledger = Ledger()
        groups: dict[str, Group] = {}
        for axis, all_members in _groups(plan).items():
            members = next(ranks for ranks in all_members if rank in ranks)
            groups[axis] = world.group(axis, members, rank, ledger)
            groups[axis].connect(CPU)
        super().__init__(plan, groups, rank, CPU)
        self._world = world

    def _open_host_group(self) -> Group:
        return self._world.host_group("pipeline", self._column, self.rank, self.ledger)

    def _open_edge_group(self, pair: tuple[int, int], pairs: Collection[tuple[int, int]]) -> Group | None:
        assert pair in pairs
        members = sorted(self._column[number] for number in pair)  # torch sorts them too
        if self.rank not in members:
            return None
        return self._world.group("pipeline", members, self.rank, self.ledger)

    def new_group(self) -> Group:
        """One more group of all ranks of this rank's pipeline; in a lazy world it is not connected yet."""
        return self._world.group("pipeline", self._column, self.rank, self.ledger)

    @property
    def _column(self) -> tuple[int, ...]:
        return self.layout.group("pipeline", self.rank)


@lru_cache(maxsize=1)  # for all ranks of one world
def _groups(plan: Plan) -> dict[str, tuple[tuple[int, ...], ...]]:
    layout = Layout(plan)
    return {axis: tuple(layout.groups(axis)) for axis in Mesh.pretend(plan, rank=0).axes}
