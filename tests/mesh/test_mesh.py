"""The mesh over real processes, and pretended."""

from collections.abc import Callable

import pytest
import torch

from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.mesh import Layout, Mesh
from echelon.plan import Plan


def members(text: str) -> dict[str, list[int]]:
    """Which ranks answer along each axis, found by talking to them."""
    mesh = Mesh.join(Plan.parse(text))
    found = {}
    for axis in mesh.axes:
        group = mesh.group(axis)
        ranks = torch.empty(group.size, dtype=torch.int64)
        group.all_gather(ranks, torch.tensor([mesh.rank]))
        found[axis] = ranks.tolist()
        assert ranks[group.rank] == mesh.rank
    return found


@pytest.mark.parametrize(
    "text", ["data=2 tensor=2", "pipeline=2 data=2", "pipeline=3-1", "pipeline=2-1-1", "data=4 expert=2"]
)
def test_groups_hold_the_ranks_of_the_layout(warm_ranks: Callable[[int], Ranks], text: str) -> None:
    layout = Layout(Plan.parse(text))
    for rank, found in enumerate(warm_ranks(4).run(members, text)):
        assert found == {axis: list(layout.group(axis, rank)) for axis in found}


def test_one_process_alone_is_a_mesh_of_one() -> None:
    mesh = Mesh.join(Plan())
    assert (mesh.rank, mesh.group("data").size, mesh.group("tensor").size) == (0, 1, 1)


def test_a_plan_for_more_ranks_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match=r"needs 4 ranks, but 1 is running.*ranks=4"):
        Mesh.join(Plan(data=4))


def test_a_pretended_mesh_stands_anywhere() -> None:
    mesh = Mesh.pretend(Plan(data=64, tensor=8, pipeline=8), rank=4095)
    assert mesh.position[:4] == (7, 63, 0, 7)
    mesh.group("tensor").all_reduce(torch.ones(8))
    assert mesh.ledger.total("tensor").sent == 2 * 7 * 4
