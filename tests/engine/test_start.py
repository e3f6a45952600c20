"""How a training starts: all ranks from the first one's model."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Ledger, RecordingGroup, group_over
from echelon.engine.start import start_equal
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.parallel.data import buffers
from tests.cases import Perceptron

Warm = Callable[[int], Ranks]


def values_after_start(bytes_at_once: int) -> tuple[list[float], int]:
    """Rank r fills its model with 100 r + the number of the tensor."""
    before, buffers.BYTES_AT_ONCE = buffers.BYTES_AT_ONCE, bytes_at_once
    group = group_over("all", torch.distributed.group.WORLD, Ledger())
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(2), nn.Linear(1, 1).double())
    model[1].weight.data = torch.empty(4)[::2]  # not contiguous
    model.register_buffer("nothing", torch.empty(0))
    with torch.no_grad():
        for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
            tensor.fill_(100 * group.rank + number)
    start_equal(model, group, torch.device("cpu"))
    buffers.BYTES_AT_ONCE = before
    assert {move.subject for move in group.ledger.moves} == {"agreement", "parameters"}
    values = [float(t.flatten()[0]) for t in [*model.parameters(), *model.buffers()] if t.numel()]
    return values, len(group.ledger.moves) - 1  # one compares the models


@pytest.mark.parametrize(("bytes_at_once", "messages"), [(2**20, 3), (1, 13)])
def test_every_rank_has_the_first_one_s_parameters_and_buffers(
    warm_ranks: Warm, bytes_at_once: int, messages: int
) -> None:
    expected = [float(number) for number in range(6)] + [7.0, 8.0, 9.0]  # 6 is the empty buffer
    for values, moves in warm_ranks(2).run(values_after_start, bytes_at_once):
        assert values == expected
        assert moves == messages  # one for each type of numbers, or one for each element


def test_one_rank_moves_nothing() -> None:
    group = RecordingGroup("all", ledger=Ledger())
    start_equal(nn.Linear(2, 2), group, torch.device("cpu"))
    assert not group.ledger.moves


def weights_of_rank_zero() -> list[Tensor]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    model = Perceptron()
    model.register_buffer("counter", torch.tensor(rank))
    model.first.weight.data = model.first.weight.data.t().contiguous().t()  # not contiguous
    start_equal(model, group_over("data", torch.distributed.group.WORLD, Ledger()), torch.device("cpu"))
    return [*model.state_dict().values()]


def test_replicas_start_as_replica_zero(warm_ranks: Warm) -> None:
    first, *others = warm_ranks(3).run(weights_of_rank_zero)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def refusal(different: str) -> str:
    """What a rank is told whose model is not that of rank 0."""
    other = torch.distributed.get_rank() == 1
    model = nn.Sequential(nn.Linear(2, 3 if other and different == "shape" else 2), nn.BatchNorm1d(3))
    model[0].weight.requires_grad_(not (other and different == "frozen"))
    if other and different == "buffer":
        model.register_buffer("more", torch.zeros(1))
    with pytest.raises(UserError) as caught:
        start_equal(model, group_over("data", torch.distributed.group.WORLD, Ledger()), torch.device("cpu"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("different", "message"),
    [
        ("shape", "of shape (2, 2) and type torch.float32, and rank 1 has 0.weight of shape (3, 2)"),
        ("frozen", "and rank 1 has 0.weight of shape (2, 2) and type torch.float32, frozen; give"),
        ("buffer", "rank 1 has more of shape (1,)"),
    ],
)
def test_ranks_with_different_models_are_refused_before_anything_moves(
    warm_ranks: Warm, different: str, message: str
) -> None:
    first, second = warm_ranks(2).run(refusal, different)
    assert first == second
    assert message in first
