"""Other memory of the model that is a weight's: refused where the plan moves the weight."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from echelon.engine.watch.aliases import check_aliases
from echelon.errors import UserError
from echelon.plan import Plan

CPU = torch.device("cpu")


def shared_parameter(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(model[0].weight.data)


def shared_buffer(model: nn.Sequential) -> None:
    model[1].register_buffer("shadow", model[0].weight.data)


def shared_view(model: nn.Sequential) -> None:
    model[1].views = {"first": [model[0].weight.data.T]}


SHARED: list[tuple[Callable[[nn.Sequential], None], str]] = [
    (shared_parameter, "0.weight is memory of the weight 1.weight"),
    (shared_buffer, "1.shadow is memory of the weight 0.weight"),
    (shared_view, "1.views is memory of the weight 0.weight"),
]


def check(share: Callable[[nn.Sequential], None], plan: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    share(model)
    check_aliases(model, Plan.parse(plan), CPU, torch.float32)


@pytest.mark.parametrize(("share", "text"), SHARED)
def test_memory_of_a_weight_that_moves_is_refused(share: Callable[[nn.Sequential], None], text: str) -> None:
    check(share, "data=2")
    for plan, what in (("data=2 zero=1", "moves"), ("update=backward", "updates in the backward pass")):
        with pytest.raises(UserError, match=f"{text}, which this plan {what}"):
            check(share, plan)


def test_a_pair_is_named_once() -> None:
    with pytest.raises(UserError) as error:
        check(shared_parameter, "data=2 zero=1")
    assert str(error.value).count("is memory of the weight") == 1


def test_tied_weights_and_memory_beside_a_weight_are_accepted() -> None:
    def tie(model: nn.Sequential) -> None:
        model[1].weight = model[0].weight

    def neighbour(model: nn.Sequential) -> None:
        both = torch.zeros(6, 3)
        model[0].weight.data, model[1].weight.data = both[:3], both[3:]

    check(tie, "data=2 zero=1")
    check(neighbour, "data=2 zero=1")


def test_a_parameter_object_in_an_attribute_is_left_behind_where_its_owner_gets_another() -> None:
    def keep(model: nn.Sequential) -> None:
        model[1].others = [model[0].weight]

    check(keep, "data=2 zero=1")
    with pytest.raises(UserError, match=r"1.others is memory of the weight 0.weight"):
        check(keep, "tensor=2")
