"""Which update and which stepper a plan has, over which ranks, and what it checks of the optimizer."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from echelon.collectives import Group
from echelon.collectives.mesh import Mesh
from echelon.engine.sharing import share_stages
from echelon.engine.stage_split import split_stages
from echelon.engine.updates import UpdateRule, make_update
from echelon.errors import UserError
from echelon.nn.wrapping import Wrapping
from echelon.parallel.layer_sharding import LayerSharding
from echelon.plan import Plan
from echelon.update.precision.stepper import DirectStepper, MasterStepper
from echelon.update.synchronous_update import SynchronousUpdate
from tests.cases import adamw, mean_loss


def update_of(plan: str, make: Any = adamw, **options: Any) -> tuple[SynchronousUpdate, Mesh]:
    """The update of rank 0, in one process."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 5))
    mesh, wrapping = Mesh.pretend(Plan.parse(plan), 0), Wrapping()
    layers = LayerSharding(model, mesh, mean_loss, {"*": "replicated"}, wrapping)
    split = split_stages(model, mesh, None, by_layers=layers.by_layers)
    local = share_stages(split, mesh, layers, wrapping, prefetch=1, smallest_unit=0)
    update = make_update(local, mesh, layers, wrapping, UpdateRule(make, **options))
    assert isinstance(update, SynchronousUpdate)
    return update, mesh


@pytest.mark.parametrize(
    ("precision", "kind"), [("fp64", DirectStepper), ("fp32", DirectStepper), ("bf16", MasterStepper)]
)
def test_below_float32_there_are_masters(precision: str, kind: type) -> None:
    update, _ = update_of(f"precision={precision}")
    assert type(update.stepper) is kind


def groups_of(update: SynchronousUpdate) -> tuple[Group, Group]:
    return update._group, update._everyone


def test_an_update_is_over_all_ranks_unless_stages_are_at_different_ones() -> None:
    update, mesh = update_of("pipeline=2 data=2 microbatches=2")
    assert groups_of(update) == (mesh.group("all"), mesh.group("all"))
    assert update._steady
    update, mesh = update_of("pipeline=2 data=2 tensor=2 microbatches=2 schedule=pipedream")
    assert groups_of(update) == (mesh.group("stage"), mesh.group("all"))
    assert (mesh.group("stage").size, mesh.group("all").size) == (4, 8)
    assert not update._steady


def test_clip_and_schedule_reach_the_update() -> None:
    update, _ = update_of("data=1", clip=0.25, schedule=lambda step: 0.5**step)
    assert update._clip == 0.25
    update.set_learning_rate(2)
    assert update.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 4)


@pytest.mark.usefixtures("packed")
def test_the_optimizer_is_over_what_this_rank_holds_of_its_stage() -> None:
    def sizes(plan: str) -> list[int]:
        update, _ = update_of(plan)
        return [p.numel() for group in update.optimizer.param_groups for p in group["params"]]

    assert sizes("data=2") == [24, 4, 20, 5]
    assert sizes("pipeline=2") == [24, 4], "the first stage"
    assert sum(sizes("data=2 zero=1")) == 14 + 13, "half of each layer: of 28 and of 25 elements"


class Seen:
    """An optimizer's maker that notes down the shapes it is given."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        self.shapes = [tuple(p.shape) for p in given]
        return torch.optim.SGD(given, lr=0.1)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_the_user_s_function_sees_parameters_in_their_own_shapes(level: int) -> None:
    seen = Seen()
    update_of(f"data=2 zero={level}", seen)
    assert seen.shapes == [(4, 6), (4,), (5, 4), (5,)]


def over_something_else(_: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_optimizer_over_other_parameters_is_refused(precision: str) -> None:
    with pytest.raises(UserError, match="2 of its 2 parameters are not those"):
        update_of(f"precision={precision}", over_something_else)


class Unknown(torch.optim.SGD):
    """Nobody knows what it needs."""


@pytest.mark.parametrize("parts", ["zero=1", "tensor=2"])
def test_parts_need_an_optimizer_that_says_what_it_needs(parts: str) -> None:
    make = partial(Unknown, lr=0.1)
    update_of("data=2", make)
    with pytest.raises(
        UserError, match=rf"optimizer Unknown with plan 'data=2 {parts}'.*`needs = \"whole\"`"
    ):
        update_of(f"data=2 {parts}", make)


def biases_alone(parameters: Any) -> torch.optim.Optimizer:
    """A rule that finds nothing in some stages."""
    biases = [p for p in parameters if p.shape == (5,)]
    return torch.optim.SGD([{"params": biases}], lr=0.1)


def test_in_a_stage_of_several_an_optimizer_may_leave_out_everything() -> None:
    update_of("data=1", biases_alone)
    update_of("pipeline=2", biases_alone)
    with pytest.raises(UserError, match="leaves out every parameter"):
        update_of("data=1", lambda _: torch.optim.SGD([{"params": []}], lr=0.1))


def test_a_function_that_names_weights_of_other_stages_is_an_error_that_says_so() -> None:
    def named(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([None, *parameters], lr=0.1)  # type: ignore[list-item]

    with pytest.raises(
        UserError, match=r"failed: TypeError: .* In a pipeline a rank has the weights of its own"
    ):
        update_of("pipeline=2", named)
    with pytest.raises(TypeError):
        update_of("data=1", named)
