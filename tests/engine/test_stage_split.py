"""Which layers a rank keeps, what it shares with other stages, and models that cannot be split.

Seen from any rank of a mesh that is only pretended.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import RecordingGroup
from echelon.collectives.mesh import Mesh
from echelon.engine.stage_split import StageSplit, split_stages
from echelon.errors import UserError
from echelon.nn.layering import listed_layers
from echelon.plan import Plan
from echelon.program import Op
from tests.nn.huggingface import models
from tests.parallel.pipeline.models import Hidden, perceptron


def split(model: nn.Module, plan: str, rank: int = 0, boundaries: Sequence[int] | None = None) -> StageSplit:
    mesh = Mesh.pretend(Plan.parse(plan), rank)
    made: dict[frozenset[int], RecordingGroup] = {}

    def group_of_stages(stages: frozenset[int]) -> RecordingGroup:
        assert stages not in made, "one group for each set of stages"
        made[stages] = RecordingGroup(f"tied {sorted(stages)}", 0, 2)
        return made[stages]

    mesh.group_of_stages = group_of_stages  # type: ignore[assignment, method-assign]
    return split_stages(model, mesh, boundaries, by_layers=False)


# What a rank keeps.


def kept(
    model: nn.Module, plan: str, rank: int, boundaries: Sequence[int] | None = None
) -> dict[int, list[int]]:
    """The numbers of the layers of each stage of a rank."""
    numbers = {layer: number for number, layer in enumerate(listed_layers(model))}
    modules = split(model, plan, rank, boundaries).modules
    return {stage: [numbers[layer] for layer in listed_layers(module)] for stage, module in modules.items()}


def ten_layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))


@pytest.mark.parametrize(
    ("plan", "rank", "expected"),
    [
        ("pipeline=2", 0, {0: [0, 1, 2, 3, 4]}),
        ("pipeline=2", 1, {1: [5, 6, 7, 8, 9]}),
        ("pipeline=2 data=2", 1, {0: [0, 1, 2, 3, 4]}),
        ("pipeline=2 data=2", 2, {1: [5, 6, 7, 8, 9]}),
        ("pipeline=2-1", 1, {0: [0, 1, 2, 3, 4]}),
        ("pipeline=2-1", 2, {1: [5, 6, 7, 8, 9]}),
    ],
)
def test_a_rank_keeps_the_layers_of_its_stages(plan: str, rank: int, expected: dict[int, list[int]]) -> None:
    assert kept(ten_layers(), f"{plan} microbatches=2", rank) == expected


def test_chunks_are_spread_over_the_ranks() -> None:
    plan = "pipeline=2 schedule=interleaved chunks=2 microbatches=2"
    first, second = (kept(ten_layers(), plan, rank) for rank in range(2))
    assert list(first) == [0, 2]
    assert list(second) == [1, 3]
    assert sorted(
        layer for stages in (first, second) for layers in stages.values() for layer in layers
    ) == list(range(10))


def test_boundaries_are_the_layers_before_which_stages_begin() -> None:
    assert kept(ten_layers(), "pipeline=3", 1, [2, 7]) == {1: [2, 3, 4, 5, 6]}
    assert split(ten_layers(), "pipeline=3", 1, [2, 7]).boundaries == [2, 7]
    assert split(ten_layers(), "pipeline=2").boundaries == [5]
    with pytest.raises(UserError, match="boundaries"):
        split(ten_layers(), "pipeline=3", 1, [7, 2])


def test_other_ranks_layers_leave_the_model_and_names_stay() -> None:
    model = ten_layers()
    modules = split(model, "pipeline=2", 1).modules
    assert [name for name, _ in modules[1].named_parameters()][:2] == ["5.weight", "5.bias"]
    assert model[0].weight is None
    assert model[5].weight is not None


def test_one_stage_is_the_model_itself() -> None:
    model = perceptron()
    result = split(model, "data=2")
    assert result.modules == {0: model}
    assert (result.shared_gradients, result.boundaries) == ({0: []}, [])


class OnTheFly(nn.Module):
    """Lists layers that it makes when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)

    def layers(self) -> list[nn.Module]:
        return [nn.Sequential(self.body)]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def test_layers_that_are_made_on_the_fly_are_called_where_their_weights_are_gathered() -> None:
    """zero=3 gathers when a unit is called; the model's own forward would never call these."""
    model = OnTheFly()
    assert split(model, "data=2").modules[0] is model
    assert split(model, "data=2 zero=3").modules[0] is not model


# What stages share.


def tied_first_and_last(trained: bool = True) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    model[3].weight = model[0].weight
    model[0].weight.requires_grad_(trained)
    return model


def ops(result: StageSplit) -> set[Op]:
    return {instruction.op for rank in result.program.ranks for instruction in rank}


def test_every_stage_of_a_tie_shares_it_and_the_first_counts_its_norm() -> None:
    first, second = (split(tied_first_and_last(), "pipeline=2", rank) for rank in range(2))
    for stage, result in enumerate((first, second)):
        (shared,) = result.shared_gradients[stage]
        assert any(shared.parameter is parameter for parameter in result.modules[stage].parameters())
        assert (shared.contributes, shared.counts_norm, shared.tie) == (True, stage == 0, 0)
        assert shared.group.axis == "tied [0, 1]"
        assert Op.TIE in ops(result)


def test_of_replicas_that_take_turns_one_brings_the_gradient_in() -> None:
    """Each has the sum over the replicas of its stage already."""
    contributes = []
    for rank in range(3):
        (shared,) = next(iter(split(tied_first_and_last(), "pipeline=2-1", rank).shared_gradients.values()))
        contributes.append(shared.contributes)
    assert contributes == [True, False, True]


def test_frozen_ties_and_stages_without_ties_share_nothing() -> None:
    for model, plan in (
        (tied_first_and_last(trained=False), "pipeline=2"),
        (ten_layers(), "pipeline=2"),
    ):
        result = split(model, plan)
        assert result.shared_gradients == {0: []}
        assert Op.TIE not in ops(result)


@pytest.mark.parametrize("trained", [True, False])
def test_a_rank_knows_which_of_its_weights_other_stages_hold_too(trained: bool) -> None:
    """Frozen ones as well, and none that it does not hold: those would keep their memory."""
    for rank, is_tied in enumerate((True, False, True)):
        model = tied_first_and_last(trained)
        weight = model[0].weight  # type: ignore[index]
        assert split(model, "pipeline=3", rank).tied == ({weight} if is_tied else set())


def two_ties() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(6)))
    model[4].weight, model[5].weight = model[1].weight, model[0].weight
    return model


def test_ties_are_numbered_alike_on_all_ranks_and_groups_are_made_once() -> None:
    for rank in range(2):
        shared = split(two_ties(), "pipeline=2", rank).shared_gradients[rank]
        assert [each.tie for each in shared] == [0, 1]
    groups = {id(shared.group) for shared in split(two_ties(), "pipeline=2").shared_gradients[0]}
    assert len(groups) == 1, "both ties are between the same stages"


# What cannot be split.


class Bare(nn.Module):
    """Lists no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = perceptron(2), nn.Parameter(torch.ones(5))

    def layers(self) -> list[nn.Module]:
        return list(self.body)


def tied() -> nn.Module:
    layer = Hidden()
    return nn.Sequential(layer, Hidden(), layer, nn.Linear(6, 5))


def with_shared_dropout() -> nn.Module:
    dropout = nn.Dropout(0.1)
    return nn.Sequential(Hidden(), dropout, Hidden(), dropout, nn.Linear(6, 5))


def with_shared_buffers() -> nn.Module:
    norm = nn.BatchNorm1d(6, affine=False)
    return nn.Sequential(Hidden(), norm, Hidden(), norm, nn.Linear(6, 5))


@pytest.mark.parametrize(
    ("plan", "make", "reason"),
    [
        ("pipeline=2", Bare, "Bare lists no layers to cut between; make it an nn.Sequential"),
        (
            "pipeline=2 schedule=interleaved chunks=3 microbatches=2",
            perceptron,
            "4 layers .* cannot make 6 stages",
        ),
        ("pipeline=2", Outside, "scale of Outside belong to no layer.*; move them"),
        ("pipeline=2 schedule=pipedream", tied, "0.linear.weight.* in several stages: .* drift apart; untie"),
        (
            "pipeline=2-1 zero=1",
            tied,
            "zero=1 pipeline=2-1 with 0.linear.weight.*; untie .* zero=0",
        ),
        (
            "pipeline=4-2 zero=1 shard=2",
            tied,
            "pipeline=4-2 with 0.linear.weight.* one rank of each stage, .*; untie .* zero=0 without shard",
        ),
        (
            "pipeline=2 schedule=interleaved chunks=2 microbatches=2",
            tied,
            "0.linear.weight is in the stages 0, 2, two of them on one rank; use other chunks",
        ),
        ("pipeline=2", with_shared_buffers, "one BatchNorm1d is used in .* have other buffers there; give"),
        (
            "pipeline=2",
            with_shared_dropout,
            "one Dropout is used in the stages 0 and 1, .* repeat its masks there; give",
        ),
    ],
)
def test_models_that_a_pipeline_cannot_cut_are_refused(
    plan: str, make: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        split(make(), plan)


class Rows(nn.Module):
    """Keeps its layers in modules that are no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))

    def layers(self) -> list[nn.Module]:
        return list(self.trunk)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x)


def test_hooks_that_would_never_run_are_named() -> None:
    """Only those of the model itself were looked at."""
    model, mesh = Rows(), Mesh.pretend(Plan(), 0)
    model.trunk[0].register_forward_hook(lambda *_: None)
    split_stages(model, mesh, None, by_layers=True)
    model.trunk.register_forward_hook(lambda *_: None)
    with pytest.raises(UserError, match=r"forward hooks of trunk: .* put the hooks on the layers"):
        split_stages(model, mesh, None, by_layers=True)
    split_stages(model, mesh, None, by_layers=False)


def test_forwards_that_were_replaced_and_would_never_run_are_named() -> None:
    model = Rows()
    model.trunk[0].forward = torch.tanh  # type: ignore[method-assign]
    split_stages(model, Mesh.pretend(Plan(), 0), None, by_layers=True)
    model.trunk.forward = torch.tanh  # type: ignore[method-assign]
    with pytest.raises(UserError, match="trunk had forward replaced"):
        split_stages(model, Mesh.pretend(Plan(), 0), None, by_layers=True)


@pytest.mark.parametrize(("plan", "by_layers"), [("recompute=full", True), ("recompute=selective", False)])
def test_only_what_is_about_layers_keeps_a_forward_from_running(plan: str, *, by_layers: bool) -> None:
    """Layers of transformers are made on the fly: its forward calls none of them."""
    mesh = Mesh.pretend(Plan.parse(plan), 0)
    assert split_stages(models.make("llama"), mesh, None, by_layers=False).by_layers == by_layers
