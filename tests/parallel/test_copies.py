"""Which tensors several ranks hold alike. That they are compared: tests/engine/audit."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from echelon.collectives import Ledger, RecordingGroup
from echelon.nn.wrapping import Wrapping
from echelon.parallel.copies import Copies, find_copies
from echelon.parallel.data.all_reduce import AllReduce
from echelon.parallel.data.parameter_set import ShardGroups, SharedGradient
from echelon.parallel.data.sharing import Sharing
from echelon.parallel.data.zero.zero import Zero
from tests.engine.audit.test_drift_in_threads import CPU, mesh_of
from tests.sets import set_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("table", torch.ones(2))


def copies_of(
    sharing: Sharing, model: nn.Module, whole: Sequence[nn.Parameter] = (), **mesh: Any
) -> list[Copies]:
    local: Any = SimpleNamespace(sharings=[sharing], modules=[model])
    groups = {axis: RecordingGroup(axis, size=2) for axis in ("weights", "tensor")}
    described = mesh_of(sharing.parameter_set.group, **groups)
    described.plan.sync = mesh.get("sync", "all-reduce")
    described.device = mesh.get("device", CPU)
    sharded: Any = SimpleNamespace(partial=whole, replicated=())
    return find_copies(local, sharded, described)


def named(copies: Copies) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in copies.named()}


def test_trained_weights_buffers_and_whole_ones_are_compared_each_over_its_ranks() -> None:
    model, group = Model(), RecordingGroup("data", size=2)
    sharing = AllReduce(set_of(model, group))
    waited: list[int] = []
    sharing.expect_weights(lambda local: waited.append(len(local)))
    replicas, buffers, tensor = copies_of(sharing, model, [model.layer.bias, model.frozen.bias])
    assert named(replicas) == {"layer.weight": [2, 3], "layer.bias": [2]}
    assert waited == [2]
    assert named(buffers) == {"table": [2]}
    assert named(tensor) == {"layer.bias": [2]}
    assert [copies.group.axis for copies in (replicas, buffers, tensor)] == ["data", "weights", "tensor"]
    assert [copies.exact for copies in (replicas, buffers, tensor)] == [True] * 3
    assert replicas.cause == buffers.cause
    assert "draws at random" in tensor.cause
    *_, tensor = copies_of(sharing, model, device=torch.device("cuda"))
    assert not tensor.exact, "threads of a device add in any order"
    assert copies_of(sharing, model, sync="async") == []


def test_shards_are_compared_with_those_of_other_copies() -> None:
    model, ledger = Model(), Ledger()
    shards = ShardGroups(RecordingGroup("shard", 0, 2, ledger), RecordingGroup("copies", 0, 2, ledger))
    sharing = Zero(set_of(model, RecordingGroup("data", 0, 4, ledger), shards=shards), 1, Wrapping())
    replicas, *_ = copies_of(sharing, model)
    assert replicas.group.axis == "copies"
    assert named(replicas) == {"layer.weight": [6]}, "rank 1 has the bias"


def test_tied_weights_are_compared_in_the_order_of_their_ties() -> None:
    model = Model()
    groups = [RecordingGroup(axis, size=2) for axis in ("later", "first", "within")]
    ties = [
        SharedGradient(model.layer.weight, groups[0], tie=1),
        SharedGradient(model.layer.bias, groups[1], tie=0),
        SharedGradient(model.layer.bias, groups[2]),  # not between stages
    ]
    sharing = AllReduce(set_of(model, RecordingGroup("data"), shared_gradients=ties))
    _, _, _, first, later = copies_of(sharing, model)
    assert [(tied.group.axis, named(tied)) for tied in (first, later)] == [
        ("first", {"layer.bias": [2]}),
        ("later", {"layer.weight": [2, 3]}),
    ]
    assert "tied weight" in first.cause
