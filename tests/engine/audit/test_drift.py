"""Drift: copies of a weight that are no longer the same are found, and what may differ is not."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon.collectives import Ledger, RecordingGroup
from echelon.engine import Engine
from echelon.engine.audit.drift import Copies, find_copies
from echelon.launching import Ranks
from echelon.models import cross_entropy
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.all_reduce import AllReduce
from echelon.parallel.data.parameter_set import ShardGroups, SharedGradient
from echelon.parallel.data.sharing import Sharing
from echelon.parallel.data.zero.zero import Zero
from tests.cases import sgd
from tests.engine.audit.test_drift_in_threads import CPU, mesh_of
from tests.parallel.tensor.models import gpt, tokens
from tests.sets import set_of

Warm = Callable[[int], Ranks]


class DropPath(nn.Module):
    """Leaves out a branch at random: from the second step on, and by a generator that each rank seeds with
    its own number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)
        self.num_calls = 0
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        branch = self.down(F.relu(self.up(x)))
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        generator = torch.Generator().manual_seed(self.num_calls * 2 + rank)
        keep = torch.rand(len(x), 1, generator=generator, dtype=x.dtype) > 0.5
        return self.norm(x + branch * (keep if self.training and self.num_calls > 1 else 1))


TABLE = {"up": "column", "down": "row", "norm": "replicated"}


def changing(change: Callable[[], object], step: int) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer that changes something more on rank 1 alone, in one of its steps."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer, num_steps = sgd(parameters), 0

        def after(*_: object) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == step:
                change()

        if torch.distributed.get_rank() == 1:
            optimizer.register_step_post_hook(after)
            optimizer.needs = "element"  # type: ignore[attr-defined]  # else a pipeline refuses hooks
        return optimizer

    return make


def engine_of(plan: str, check_every: int, changed: str = "") -> Engine:
    torch.manual_seed(0)
    table = TABLE if "tensor" in plan else None
    model = DropPath()

    def change() -> None:
        first = (dict(model.named_parameters()) | dict(model.named_buffers()))[changed].data[:1]
        first.copy_(torch.nextafter(first, torch.tensor(9.0)))

    return echelon.parallelize(
        model,
        plan,
        optimizer=changing(change, 3) if changed else sgd,
        loss=F.mse_loss,
        tensor_table=table,
        audit="off",
        check_every=check_every,
    )


def answers(plan: str, check_every: int, changed: str = "") -> list[str]:
    """What each of 5 steps says; `changed`: what rank 1 alone changes in the third."""
    engine = engine_of(plan, check_every, changed)
    said = []
    for step in range(5):
        inputs, targets = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step))
        try:
            engine.step(engine.local((inputs, targets)))
            said.append("")
        except echelon.UserError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("name", ["norm.weight", "table"])
def test_what_one_replica_changes_is_named(warm_ranks: Warm, name: str) -> None:
    """A weight, or a buffer; of one bit, at the next comparison; then by every later one."""
    first, other = warm_ranks(2).run(answers, "data=2", 2, name)
    assert first == other
    assert first[:2] == ["", ""]
    assert f"after step 3 rank 0 and rank 1 hold different values of {name}, of" in first[2]
    assert first[3] == ""
    assert "after step 5 " in first[4]


def test_replicas_may_draw_at_random_each_for_itself(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(answers, "data=2", 1) == [[""] * 5] * 2


def test_ranks_along_tensor_may_not(warm_ranks: Warm) -> None:
    """The first step's gradients were the same, and only those were compared."""
    first, other = warm_ranks(2).run(answers, "tensor=2", 1)
    assert first == other
    assert first[0] == ""
    assert "after step 2 rank 0 and rank 1 hold different values of" in first[1]
    assert "draws at random by itself" in first[1]


def test_nobody_asks_where_it_is_off(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(answers, "tensor=2", 0) == [[""] * 5] * 2


def moved_bytes(plan: str) -> list[int]:
    """What each of 4 steps moves for checks."""
    engine = engine_of(plan, 3)
    moved = []
    for step in range(4):
        inputs, targets = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step))
        engine.step(engine.local((inputs, targets)))
        moved.append(sum(move.traffic.sent for move in engine.ledger.moves if move.subject == "checks"))
    return moved


def test_steps_between_move_nothing(warm_ranks: Warm) -> None:
    (first, second, third, fourth), _ = warm_ranks(2).run(moved_bytes, "data=2")
    assert (second, third) == (0, 0)
    assert fourth == first > 0


def tied_answers(plan: str) -> list[str]:
    def change() -> None:
        engine._local.local_parameters()[-1].tensor.data.mul_(2)

    torch.manual_seed(0)
    make = changing(change, 2)
    engine = echelon.parallelize(gpt(), plan, optimizer=make, loss=cross_entropy, check_every=1, audit="off")
    said = []
    for step in range(3):
        try:
            engine.step(engine.local(tokens(step, 4)))
            said.append("")
        except echelon.UserError as error:
            said.append(str(error))
    return said


def test_a_tied_weight_is_the_same_on_both_stages(warm_ranks: Warm) -> None:
    first, other = warm_ranks(2).run(tied_answers, "pipeline=2")
    assert first == other
    assert first[0] == ""
    assert "embedding.tokens.weight" in first[1]
    assert "tied" in first[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "tensor=4 precision=fp32",
        "tensor=4 sequence=true precision=bf16",
        "data=4 shard=2 zero=2",
        "data=2 tensor=2 zero=3",
        "data=2 pipeline=2 zero=3",
        "data=2 pipeline=2 microbatches=2",
        "tensor=2 pipeline=2 schedule=zero-bubble microbatches=2",
        "data=2 context=2",
    ],
)
def test_copies_of_right_plans_are_the_same_in_every_bit(warm_ranks: Warm, plan: str) -> None:
    assert warm_ranks(4).run(right_answers, plan) == [3] * 4


def right_answers(plan: str) -> int:
    torch.manual_seed(0)
    engine = echelon.parallelize(gpt(), plan, optimizer=sgd, loss=cross_entropy, check_every=1, audit="off")
    for step in range(3):
        engine.step(engine.local(tokens(step, 8)))
    return engine.steps


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
