"""Ranks that have different units are refused before they gather any: every rank raises the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon
from echelon.collectives import Group, Ledger, MismatchError, RecordingGroup
from echelon.collectives.torch_group import TorchGroup
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.zero.residency import GatherAgreement, check_same_units, explain_mismatch
from echelon.parallel.data.zero.units import divide_units
from echelon.parallel.data.zero.zero import Zero
from tests.cases import adamw
from tests.contract_models import class_loss, vectors
from tests.nccl_like import NcclWorld
from tests.sets import set_of
from tests.thread_ranks import Exchange, ThreadGroup, run_threads

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


# Before each message of the first step, ranks compare what they are about to do.


Action = Callable[[GatherAgreement], object]


def answers(*actions: list[Action]) -> list[list[str]]:
    """What each of the actions of each rank says."""

    def run(group: Group) -> list[str]:
        agreement = GatherAgreement(group, group, ["", "layer"], CPU)
        said = []
        for action in actions[group.rank]:
            try:
                action(agreement)
                said.append("")
            except UserError as error:
                said.append(str(error))
        return said

    return run_threads(len(actions), run)


def gather(unit: int) -> Action:
    return lambda agreement: agreement.gather(unit)


def reduce(unit: int) -> Action:
    return lambda agreement: agreement.reduce(unit)


def finish(agreement: GatherAgreement) -> None:
    agreement.finish_pass()


def close(agreement: GatherAgreement) -> None:
    agreement.close()


def test_ranks_that_do_the_same_go_on() -> None:
    actions = [gather(0), gather(1), reduce(1), reduce(0), finish]
    assert answers(actions, actions) == [[""] * 5] * 2


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (
            gather(1),
            gather(0),
            "gathers the weights of module 'layer', and rank 1 gathers the weights of the model itself",
        ),
        (
            gather(1),
            reduce(1),
            "gathers the weights of module 'layer', and rank 1 reduces the gradients of module 'layer'",
        ),
        (reduce(0), finish, "reduces the gradients of the model itself, and rank 1 has finished a pass"),
        (finish, gather(0), "has finished a pass, and rank 1 gathers the weights of the model itself"),
    ],
)
def test_a_difference_names_what_each_is_about_to_do(one: Action, other: Action, words: str) -> None:
    first, second = answers([one, gather(0)], [other, gather(0)])
    assert first == second
    assert first[0].endswith(f"(rank 0 along data {words})")
    assert first[1] == first[0], "it is raised again"


def test_of_three_ranks_the_first_that_differs_is_named() -> None:
    said = answers([gather(0)], [gather(0)], [gather(1)])
    assert "and rank 2 gathers the weights of module 'layer'" in said[0][0]


def test_when_it_is_closed_nobody_talks() -> None:
    assert answers([close, gather(0), finish], [close, gather(1), reduce(0)]) == [[""] * 3] * 2


def test_groups_that_agree_are_told_of_one_that_does_not() -> None:
    """Ranks 0 and 1 shard a copy and differ, ranks 2 and 3 shard another and agree."""
    pairs = [Exchange(2), Exchange(2)]

    def run(everyone: Group) -> tuple[str, list[str]]:
        pair = ThreadGroup(pairs[everyone.rank // 2], everyone.rank % 2, "shard")
        agreement = GatherAgreement(pair, everyone, ["a", "b"], CPU)
        try:
            agreement.gather(int(everyone.rank == 1))
            agreement.finish_pass()
        except UserError as error:
            return str(error).rpartition(" (")[2], [move.subject for move in everyone.ledger.moves]
        return "", []

    (first, subjects), (second, _), (third, _), (fourth, _) = run_threads(4, run)
    assert first == second
    assert first.startswith("rank 0 along shard gathers")
    assert third == fourth
    assert third.startswith("bytes) above the size")
    assert subjects == ["agreement"]


def test_groups_that_all_agree_are_told_so() -> None:
    def run(everyone: Group) -> int:
        agreement = GatherAgreement(RecordingGroup("shard"), everyone, ["a"], CPU)
        agreement.gather(0)
        agreement.finish_pass()
        agreement.close()
        agreement.finish_pass()
        return len(everyone.ledger.moves)

    assert run_threads(2, run) == [1, 1]


def test_an_agreement_with_all_replicas_costs_no_message_more() -> None:
    def run(group: Group) -> int:
        GatherAgreement(group, group, ["a"], CPU).finish_pass()
        return len(group.ledger.moves)

    assert run_threads(2, run) == [1, 1]


def test_a_message_that_met_another_is_explained() -> None:
    with (
        pytest.raises(UserError, match=r"ranks ran different modules in this step.*\(the message\)"),
        explain_mismatch(),
    ):
        raise MismatchError("the message")
    with explain_mismatch():
        pass
