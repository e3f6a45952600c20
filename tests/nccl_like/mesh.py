"""The mesh of a plan over an NcclWorld: which groups there are, and how they are made, is the real mesh's."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import final

from echelon.collectives import Group, Ledger
from echelon.mesh import Mesh
from echelon.mesh.layout import Layout
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

    def _open_group(self, groups: Iterable[Sequence[int]], backend: str | None = None) -> Group | None:
        members = next((ranks for ranks in groups if self.rank in ranks), None)
        if members is None:
            return None
        make = self._world.host_group if backend == "gloo" else self._world.group
        return make("pipeline", sorted(members), self.rank, self.ledger)  # torch sorts them too

    def new_group(self) -> Group:
        """One more group of all ranks of this rank's pipeline; in a lazy world it is not connected yet."""
        return self._world.group("pipeline", self.layout.group("pipeline", self.rank), self.rank, self.ledger)


@lru_cache(maxsize=1)  # for all ranks of one world
def _groups(plan: Plan) -> dict[str, tuple[tuple[int, ...], ...]]:
    layout = Layout(plan)
    return {axis: tuple(layout.groups(axis)) for axis in Mesh.pretend(plan, rank=0).axes}
