"""A stage passes on what is asked of it to each of its parameter sets, and a rank to each of its stages."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from echelon.collectives import Ledger, RecordingGroup
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.buffers import Buffers
from echelon.parallel.data.parameter_set import ParameterSet, SharedGradient, named_subset
from echelon.parallel.data.sharing import Sharing, SingleReplica, Storages
from echelon.parallel.data.zero.zero import Zero
from echelon.parallel.stage import (
    LocalStages,
    Stage,
    iterated_modules,
    no_iteration,
)
from echelon.program import build
from echelon.state.ownership import LocalParameter, OwnedSlice, whole_slice
from tests.sets import set_of


def two_sets(level: int) -> Stage:
    """The weight is sharded over two ranks, the bias is on this rank alone."""
    module = nn.Linear(3, 2)
    replicas, alone = RecordingGroup("data", 0, 2), RecordingGroup("expert_data")
    sharded = Zero(set_of(module, replicas, only={module.weight}), level, Wrapping())
    single = SingleReplica(set_of(module, alone, only={module.bias}))
    return Stage(0, module, [single, sharded], Buffers(module, replicas))


def test_one_set_whose_ranks_talk_in_every_microbatch_is_enough() -> None:
    assert not two_sets(level=1).lockstep
    assert two_sets(level=2).lockstep


@pytest.mark.usefixtures("packed")
def test_a_step_goes_through_all_sets() -> None:
    stage = two_sets(level=2)
    assert isinstance(stage.module, nn.Linear)
    for sharing in stage.sharings:
        sharing.start_step()
    output = stage.forward(stage.module.weight.new_ones(4, 3))
    stage.start_backward(last=True)
    output.sum().backward()
    stage.finish_backward()
    stage.reduce()
    gradients = [local.tensor.grad for sharing in stage.sharings for local in sharing.local_parameters()]
    assert [gradient.tolist() for gradient in gradients if gradient is not None] == [[4, 4], [4, 4, 4]]


def test_a_stage_describes_its_sets() -> None:
    assert two_sets(level=1).describe() == (
        "stage 0: dense 2 parameters over expert_data (1), SingleReplica; "
        "dense 6 parameters over data (2), Zero"
    )


# All stages of a rank.


class Recorded(Sharing):
    """Notes down what is asked of it, in a log that all share."""

    def __init__(self, name: str, log: list[str]) -> None:
        module = nn.Linear(1, 1, bias=False)
        super().__init__(ParameterSet(name, named_subset(module), RecordingGroup("data")))
        self.name, self.log = name, log
        self.parameter = module.weight

    def note(self, call: str) -> None:
        self.log.append(f"{self.name} {call}")

    def local_parameters(self) -> list[LocalParameter]:
        return [LocalParameter(self.name, self.parameter, self.parameter)]

    def start_step(self) -> None:
        self.note("start_step")

    def start_backward(self, *, last: bool) -> None:
        self.note(f"start_backward last={last}")

    def finish_backward(self) -> None:
        self.note("finish_backward")

    def reduce(self) -> None:
        self.note("reduce")

    def norm_share(self) -> list[Tensor]:
        return [torch.full((1,), float(self.name))]

    def publish(self) -> None:
        self.note("publish")

    def owned(self) -> list[OwnedSlice]:
        return [OwnedSlice(whole_slice(self.name, self.parameter), self.parameter)]

    def storages(self) -> Storages:
        return Storages([self.parameter], self.norm_share())

    def gather(self, *, backward: bool) -> None:
        self.note(f"gather backward={backward}")

    def free(self) -> None:
        self.note("free")

    def reallocate(self) -> None:
        self.note("reallocate")

    def close(self) -> None:
        self.note("close")


def two_stages() -> tuple[LocalStages, list[str]]:
    """Stage 0 has the sets 1 and 2, stage 3 has set 3."""
    log: list[str] = []
    stages = {}
    for number, names in ((0, "12"), (3, "3")):
        module = nn.Linear(1, 1)
        buffers = Buffers(module, RecordingGroup("data"))
        stages[number] = Stage(number, module, [Recorded(name, log) for name in names], buffers)
    return LocalStages(stages, build("naive", (1,), 1), []), log


def take(log: list[str]) -> list[str]:
    taken = list(log)
    log.clear()
    return taken


@pytest.mark.parametrize("call", ["start_step", "publish", "reallocate", "close"])
def test_what_is_asked_of_all_stages_goes_to_all_their_sets_once(call: str) -> None:
    local, log = two_stages()
    getattr(local, call)()
    assert log == [f"1 {call}", f"2 {call}", f"3 {call}"]


def test_what_is_asked_of_a_stage_goes_to_its_own_sets() -> None:
    local, log = two_stages()
    stage = local.stages[0]
    stage.start_backward(last=True)
    stage.finish_backward()
    assert take(log) == [
        *("1 start_backward last=True", "2 start_backward last=True"),
        *("1 finish_backward", "2 finish_backward"),
    ]
    stage.start_backward(last=False)
    assert take(log) == ["1 start_backward last=False", "2 start_backward last=False"]
    for backward in (False, True):
        stage.gather(backward=backward)
        assert take(log) == [f"1 gather backward={backward}", f"2 gather backward={backward}"]
    stage.free()
    stage.reduce()
    assert take(log) == ["1 free", "2 free", "1 reduce", "2 reduce"]


def test_lists_are_those_of_all_stages() -> None:
    local, _ = two_stages()
    assert [each.name for each in local.local_parameters()] == ["1", "2", "3"]
    assert [float(gradient) for gradient in local.norm_share()] == [1.0, 2.0, 3.0]
    assert [each.slice.name for each in local.owned_weights()] == ["1", "2", "3"]
    assert [(sharing.parameter_set.name, each.name) for sharing, each in local.slices()] == [
        *(("1", "1"), ("2", "2"), ("3", "3"))
    ]
    storages = local.storages()
    assert {id(tensor) for tensor in storages.parameters} == {id(each.tensor) for _, each in local.slices()}
    assert [float(tensor) for tensor in storages.gradients] == [1.0, 2.0, 3.0]
    assert len(local.trained()) == len(local.sharings) == 3
    assert local.modules == [local.stages[0].module, local.stages[3].module]


def test_one_stage_in_lockstep_is_enough() -> None:
    local, _ = two_stages()
    assert not local.lockstep
    local.stages[3].sharings[0].lockstep = True
    assert local.lockstep


def single(module: nn.Module, *shared: SharedGradient) -> LocalStages:
    sharing = SingleReplica(set_of(module, RecordingGroup("data"), shared_gradients=shared))
    stage = Stage(0, module, [sharing], Buffers(module, RecordingGroup("data")))
    return LocalStages({0: stage}, build("naive", (1,), 1), [])


def test_the_norm_leaves_out_what_other_stages_count() -> None:
    module = nn.Linear(2, 2)
    local = single(module, SharedGradient(module.weight, RecordingGroup("tied"), counts_norm=False, tie=0))
    module.weight.grad, module.bias.grad = torch.ones(2, 2), torch.ones(2)
    assert [gradient is module.bias.grad for gradient in local.norm_share()] == [True]


def test_reallocate_gives_new_memory_and_leaves_the_old_as_it_was() -> None:
    module = nn.Linear(2, 2)
    old = [parameter.data for parameter in module.parameters()]
    single(module).reallocate()
    with torch.no_grad():
        for parameter, before in zip(module.parameters(), old, strict=True):
            assert torch.equal(parameter, before)
            parameter.zero_()
    assert all(before.any() for before in old)


def test_ties_wait_for_all_stages_and_other_shared_gradients_for_their_own() -> None:
    ledger = Ledger()
    groups = {name: RecordingGroup(name, 0, 2, ledger) for name in ("tensor", "tied")}
    module = nn.Linear(2, 2)
    local = single(
        module,
        SharedGradient(module.weight, groups["tied"], tie=0),
        SharedGradient(module.bias, groups["tensor"]),
    )
    module.weight.grad, module.bias.grad = torch.ones(2, 2), torch.ones(2)
    local.stages[0].reduce()
    assert {move.axis for move in ledger.moves} == {"tensor"}
    ledger.start_step()
    local.sum_tied_gradients()
    assert {move.axis for move in ledger.moves} == {"tied"}


def test_publishing_a_stage_shares_its_buffers_too() -> None:
    group, module = RecordingGroup("data", 0, 2), nn.BatchNorm1d(2)
    Stage(0, module, [], Buffers(module, group)).publish()
    assert {move.subject for move in group.ledger.moves} == {"buffers"}


# Spectral norms between the microbatches of a step: estimates stay, and nothing else does.


@pytest.mark.parametrize("normalise", [nn.utils.spectral_norm, parametrizations.spectral_norm])
def test_nothing_iterates_inside_and_dropout_goes_on(normalise: object) -> None:
    """With the hook, the whole layer was in evaluation mode, and did not drop out."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    normalise(layer, "in_proj_weight")  # type: ignore[operator]
    x = torch.randn(2, 3, 8)
    layer(x, x, x)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    assert before
    with no_iteration(iterated_modules(layer)):
        outputs = [layer(x, x, x)[0] for _ in range(2)]
        weight = layer.in_proj_weight
    assert all(torch.equal(before[name], buffer) for name, buffer in layer.named_buffers())
    assert not torch.equal(*outputs), "it drops out"
    assert float(torch.linalg.matrix_norm(weight.detach(), 2)) < 3, "it is normalised"
    layer(x, x, x)
    assert not all(torch.equal(before[name], buffer) for name, buffer in layer.named_buffers())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.seen = self.calls + 1, self.seen + len(x)
        return x + self.calls


def test_each_microbatch_begins_with_what_counts_steps() -> None:
    layer = Counting()
    stage = single(layer).stages[0]
    stage.counted = [(layer, "calls")]
    read = []
    for _ in range(2):
        stage.start_step()
        read.append([float(stage.forward(torch.zeros(3, 1))[0]) for _ in range(3)])
    assert read == [[1, 1, 1], [2, 2, 2]]
    assert (layer.calls, layer.seen) == (2, 18)
