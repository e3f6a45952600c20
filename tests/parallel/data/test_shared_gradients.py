"""Weights that two ranks hold as parts of different models: both make the same update, one counts it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from echelon.collectives import Ledger, RecordingGroup, group_over
from echelon.launching import Ranks
from echelon.parallel.data import SharedGradient, SingleReplica, sum_tied, sum_within_stage
from echelon.parallel.data.shared_gradients import _gradients
from tests.sets import set_of

Warm = Callable[[int], Ranks]
Summed = tuple[list[float] | None, list[float] | None, float, set[str]]


def summed(users: list[int], contributors: list[int], tie: int | None = None) -> Summed:
    """Rank r holds a weight that both share and one of its own; `users` have a gradient of 10^r for it."""
    group = group_over("tied", torch.distributed.group.WORLD, Ledger())
    alone = RecordingGroup("data", ledger=group.ledger)
    module = nn.ParameterDict({"own": nn.Parameter(torch.zeros(2)), "shared": nn.Parameter(torch.zeros(2))})
    shared, own = module["shared"], module["own"]
    gradient = SharedGradient(
        shared, group, contributes=group.rank in contributors, counts_norm=group.rank == 0, tie=tie
    )
    sharing = SingleReplica(set_of(module, alone, shared_gradients=[gradient]))
    sharing.start_step()
    own.grad = torch.full((2,), 5.0)
    if group.rank in users:
        shared.grad = torch.full((2,), 10.0**group.rank)
    sharing.reduce()
    sum_within_stage([sharing])
    if tie is not None:
        assert not group.ledger.moves, "a tie between stages waits for all of them"
        sum_tied([sharing])
    square = sum(float(gradient.square().sum()) for gradient in sharing.norm_share())
    total = None if shared.grad is None else shared.grad.tolist()
    assert own.grad is not None
    return total, own.grad.tolist(), square, {move.subject for move in group.ledger.moves}


@pytest.mark.parametrize("tie", [None, 0])
def test_both_end_with_the_sum_and_one_counts_it(warm_ranks: Warm, tie: int | None) -> None:
    first, second = warm_ranks(2).run(summed, [0, 1], [0, 1], tie)
    assert first[:2] == second[:2] == ([11.0, 11.0], [5.0, 5.0])
    assert (first[2], second[2]) == (50.0 + 242.0, 50.0)
    assert first[3] == {"tied gradients"}


@pytest.mark.parametrize(("user", "value"), [(0, 1.0), (1, 10.0)])
def test_who_did_not_use_it_gets_the_other_s(warm_ranks: Warm, user: int, value: float) -> None:
    first, second = warm_ranks(2).run(summed, [user], [0, 1])
    assert first[0] == second[0] == [value, value]
    assert first[2] == 50.0 + 2 * value**2


def test_what_nobody_used_stays_without_a_gradient(warm_ranks: Warm) -> None:
    for total, _, square, _ in warm_ranks(2).run(summed, [], [0, 1]):
        assert total is None
        assert square == 50.0


def test_who_does_not_contribute_brings_nothing_in(warm_ranks: Warm) -> None:
    """A replica of the contributor: its gradient is the same sum already."""
    first, second = warm_ranks(2).run(summed, [0, 1], [0])
    assert first[0] == second[0] == [1.0, 1.0]


def test_ties_are_summed_in_their_order_whatever_the_stages() -> None:
    """Ranks hold different stages. In the order of their own stages they would wait for each other."""
    ledger = Ledger()
    sharings = []
    for tie in (2, 0, 1):
        module = nn.Linear(2, 2, bias=False)
        group = RecordingGroup(f"tie {tie}", 0, 2, ledger)
        gradient = SharedGradient(module.weight, group, tie=tie)
        sharings.append(SingleReplica(set_of(module, RecordingGroup("data"), shared_gradients=[gradient])))
        module.weight.grad = torch.ones(2, 2)
    sum_tied(sharings)
    assert list(dict.fromkeys(move.axis for move in ledger.moves)) == ["tie 0", "tie 1", "tie 2"]


def test_gradients_of_low_precision_are_summed_in_float32() -> None:
    """Also where this rank has none, or holds nothing of the parameter and brings zeros."""
    group = RecordingGroup("tensor", 0, 2)
    module = nn.ParameterList([torch.zeros(2, dtype=torch.bfloat16) for _ in range(3)])
    shared = [SharedGradient(parameter, group) for parameter in module]
    sharing = SingleReplica(set_of(module, RecordingGroup("data"), shared_gradients=shared))
    module[0].grad = torch.ones(2)
    gradients = [
        gradient
        for each, held in zip(shared, sharing.local_parameters(), strict=True)
        for gradient in _gradients(each, [held] if each.parameter is not module[2] else [])
    ]
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 3
    sum_within_stage([sharing])
    assert [move.traffic.payload for move in group.ledger.moves] == [3, 4 * (2 + 2)]


def test_what_one_group_sums_is_one_message_of_each_type() -> None:
    group = RecordingGroup("tensor", 0, 2)
    module = nn.ParameterList([torch.zeros(2), torch.zeros(3), torch.zeros(5, dtype=torch.float64)])
    shared = [SharedGradient(parameter, group) for parameter in module]
    sharing = SingleReplica(set_of(module, RecordingGroup("data"), shared_gradients=shared))
    for number, parameter in enumerate(module):
        parameter.grad = torch.full_like(parameter, number)
    sum_within_stage([sharing])
    assert [move.traffic.payload for move in group.ledger.moves] == [3, 4 * (2 + 3), 8 * 5]
    assert [parameter.grad.tolist() for parameter in module] == [[0.0] * 2, [1.0] * 3, [2.0] * 5]
