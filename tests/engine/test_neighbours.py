"""Samples of other replicas, for an audit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.audit.agreement import RankAgreement
from echelon.engine.neighbours import share_samples
from echelon.launching import Ranks
from tests.cases import sgd

Warm = Callable[[int], Ranks]


def shared() -> list[list[float]]:
    """What this replica has after sharing: where weights are whole, and where all must run the same."""
    engine = echelon.parallelize(nn.Linear(1, 1), "data=2", optimizer=sgd, loss=F.mse_loss, audit="off")
    mesh = engine.mesh
    agreement = RankAgreement(mesh.group("all"), mesh.device)
    own = torch.full((1 + mesh.rank,), float(mesh.rank))
    return [share_samples(own, mesh, agreement, always=always).tolist() for always in (False, True)]


def test_samples_are_shared_where_all_replicas_must_run_the_same_modules(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(shared) == [[[0.0], [0.0]], [[1.0, 1.0], [0.0]]]


class Branch(nn.Module):
    """Runs one of two blocks, as its samples are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.blocks[int(x.mean() > 0)](x)
        return output


def layers_of_branches() -> str:
    torch.manual_seed(0)
    table = {"blocks.*.0": "column", "blocks.*.1": "row"}
    plan = "data=2 tensor=2"
    engine = echelon.parallelize(Branch(), plan, optimizer=sgd, loss=F.mse_loss, tensor_table=table)
    sign = 1.0 if engine.replica else -1.0
    engine.step((torch.full((2, 4), sign), torch.ones(2, 4)))
    return next(str(result) for result in engine.audit if result.name == "layers")


@pytest.mark.slow
def test_replicas_compare_the_same_layers(warm_ranks: Warm) -> None:
    # Each compared the layers of its own samples, and waited for the other one.
    assert warm_ranks(4).run(layers_of_branches) == ["layers: held"] * 4
