"""Ranks that have different units are refused before they gather any: every rank raises the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon
from echelon.collectives import Group, Ledger, RecordingGroup
from echelon.collectives.torch_group import TorchGroup
from echelon.launching import Ranks
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data import Zero, divide_units
from echelon.parallel.data.zero.unit_agreement import check_same_units
from tests.cases import adamw
from tests.contract_models import class_loss, vectors
from tests.nccl_like import NcclWorld
from tests.sets import set_of

CPU = torch.device("cpu")


class TwoLayers(nn.Module):
    """Lists no layers: units are made by size."""

    def __init__(self, middle: str = "first") -> None:
        super().__init__()
        self.middle = middle
        self.add_module(middle, nn.Linear(6, 6))
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(getattr(self, self.middle)(x))  # type: ignore[no-any-return]


def train_by_rank(level: int, options: list[dict[str, Any]], names: list[str]) -> str:
    """What each rank is told, which has its own options and model."""
    rank = dist.get_rank()
    model = TwoLayers(names[rank])
    plan = f"data=2 zero={level}"
    try:
        with echelon.parallelize(
            model, plan, optimizer=adamw, loss=class_loss, **({"smallest_unit": 0} | options[rank])
        ) as engine:
            engine.step(engine.local(vectors(0)))
    except echelon.UserError as error:
        return str(error)
    return ""


SAME = ["first", "first"]
CASES: dict[str, tuple[int, list[dict[str, Any]], list[str], str]] = {
    "smallest_unit": (
        3,
        [{}, {"smallest_unit": 10**6}],
        SAME,
        "rank 0 has first.weight of shape (6, 6) and type torch.float32 in unit 'first', and "
        "rank 1 has first.weight of shape (6, 6) and type torch.float32 in the unit of the model itself",
    ),
    "prefetch": (
        3,
        [{"prefetch": 1}, {"prefetch": 2}],
        SAME,
        "rank 0 has prefetch=1, and rank 1 has prefetch=2",
    ),
    "model": (
        1,
        [{}, {}],
        ["first", "other"],
        "ranks 0 and 1 have different models: rank 0 has first.weight of shape (6, 6)",
    ),
    "prefetch where nothing is gathered ahead": (2, [{"prefetch": 1}, {"prefetch": 2}], SAME, ""),
}


@pytest.mark.parametrize(("level", "options", "names", "message"), CASES.values(), ids=CASES)
def test_ranks_that_differ_are_refused_on_every_rank(
    warm_ranks: Callable[[int], Ranks],
    level: int,
    options: list[dict[str, Any]],
    names: list[str],
    message: str,
) -> None:
    """Over NCCL they waited for each other forever."""
    first, second = warm_ranks(2).run(train_by_rank, level, options, names)
    assert first == second
    assert (message in first) if message else first == ""


def share_over_gloo(level: int) -> str:
    """What a rank is told over a group of torch's, which looks at no message."""
    group = TorchGroup("data", dist.group.WORLD, Ledger())
    model = TwoLayers(["first", "other"][group.rank])
    try:
        Zero(set_of(model, group), level, Wrapping())
    except echelon.UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("level", [1, 2, 3])
def test_ranks_that_differ_are_refused_over_gloo(warm_ranks: Callable[[int], Ranks], level: int) -> None:
    first, second = warm_ranks(2).run(share_over_gloo, level)
    assert first == second
    assert "in unit 'first', and rank 1 has other.weight of shape (6, 6)" in first


def difference(*models: nn.Module) -> str:
    """What every rank raises, each with its own model."""
    world = NcclWorld(len(models))

    def check(rank: int) -> str:
        group: Group = world.group("data", range(len(models)), rank)
        with pytest.raises(echelon.UserError) as caught:
            check_same_units(divide_units(models[rank], smallest=0), 1, group, CPU)
        return str(caught.value)

    first, *others = world.run(check)
    assert others == [first] * len(others)
    return first.partition("together: ")[2].partition(";")[0]


def frozen(model: TwoLayers) -> TwoLayers:
    model.last.requires_grad_(False)
    return model


def test_the_first_difference_is_named() -> None:
    layers = nn.Sequential(nn.Linear(2, 2))
    assert difference(layers, layers, nn.Sequential(nn.Linear(2, 3))) == (
        "rank 0 has 0.weight of shape (2, 2) and type torch.float32 in unit '0', and "
        "rank 2 has 0.weight of shape (3, 2) and type torch.float32 in unit '0'"
    )
    assert difference(layers, nn.Sequential(*layers, nn.Linear(2, 2))).startswith(
        "rank 0 has nothing more, and"
    )
    assert difference(TwoLayers(), TwoLayers().bfloat16()).endswith("type torch.bfloat16 in unit 'first'")
    assert difference(TwoLayers(), frozen(TwoLayers())).endswith("type torch.float32, frozen, in unit 'last'")


def test_what_is_the_same_is_compared_by_a_few_numbers() -> None:
    group = RecordingGroup("data", size=4)
    check_same_units(divide_units(TwoLayers(), smallest=0), 1, group, CPU)
    (move,) = group.ledger.moves
    assert (move.operation, move.subject, move.traffic.payload) == ("all_reduce", "agreement", 32)
