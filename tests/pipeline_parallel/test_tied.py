"""Weights that two ranks hold as parts of different models: both make the same update, one counts it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from echelon.collectives import Ledger, group_over
from echelon.data_parallel import Bond, Tied
from echelon.data_parallel.sync import Alone
from echelon.launching import Ranks

Warm = Callable[[int], Ranks]
Told = tuple[list[float] | None, list[float] | None, float, set[str]]


def summed(users: list[int], speakers: list[int]) -> Told:
    """Rank r holds a weight that both share and one of its own; `users` have a gradient of 10^r for it."""
    group = group_over("tied", torch.distributed.group.WORLD, Ledger())
    module = nn.ParameterDict({"own": nn.Parameter(torch.zeros(2)), "shared": nn.Parameter(torch.zeros(2))})
    shared, own = module["shared"], module["own"]
    bond = Bond(shared, group, speaks=group.rank in speakers, counts=group.rank == 0)
    tied = Tied(Alone(module), [bond])
    tied.start_step()
    own.grad = torch.full((2,), 5.0)
    if group.rank in users:
        shared.grad = torch.full((2,), 10.0**group.rank)
    tied.finish_gradients()
    square = sum(float(gradient.square().sum()) for gradient in tied.norm_share())
    told = None if shared.grad is None else shared.grad.tolist()
    assert own.grad is not None
    return told, own.grad.tolist(), square, {move.subject for move in group.ledger.moves}


def test_both_end_with_the_sum_and_one_counts_it(warm_ranks: Warm) -> None:
    first, second = warm_ranks(2).run(summed, [0, 1], [0, 1])
    assert first[:2] == second[:2] == ([11.0, 11.0], [5.0, 5.0])
    assert (first[2], second[2]) == (50.0 + 242.0, 50.0)
    assert first[3] == {"tied gradients"}


@pytest.mark.parametrize(("user", "value"), [(0, 1.0), (1, 10.0)])
def test_who_did_not_use_it_gets_the_other_s(warm_ranks: Warm, user: int, value: float) -> None:
    first, second = warm_ranks(2).run(summed, [user], [0, 1])
    assert first[0] == second[0] == [value, value]
    assert first[2] == 50.0 + 2 * value**2


def test_what_nobody_used_stays_without_a_gradient(warm_ranks: Warm) -> None:
    for told, _, square, _ in warm_ranks(2).run(summed, [], [0, 1]):
        assert told is None
        assert square == 50.0


def test_who_does_not_speak_brings_nothing_in(warm_ranks: Warm) -> None:
    """A replica of the speaker: its gradient is the same sum already."""
    first, second = warm_ranks(2).run(summed, [0, 1], [0])
    assert first[0] == second[0] == [1.0, 1.0]
