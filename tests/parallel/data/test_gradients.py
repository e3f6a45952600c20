"""The norm of gradients, and how much to clip."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Ledger, RecordingGroup, group_over
from echelon.launching import Ranks
from echelon.parallel.data.gradients import _gradients, clip_factor, squared_norm, sum_tied, sum_within_stage
from echelon.parallel.data.parameter_set import SharedGradient
from echelon.parallel.data.sharing import SingleReplica
from tests.reads import no_reads
from tests.sets import set_of

CPU = torch.device("cpu")


def sparse(places: list[int], values: list[float]) -> Tensor:
    """What an embedding makes. (torch 2.11 warns of its own constructor of sparse tensors.)"""
    table = nn.Parameter(torch.zeros(4, 1))
    rows = nn.functional.embedding(torch.tensor(places), table, sparse=True)
    rows.backward(torch.tensor(values).view(-1, 1))
    assert table.grad is not None
    return table.grad


@pytest.mark.parametrize(
    "gradients",
    [
        [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])],
        [torch.tensor([3.0, 4.0, 0.0]), torch.tensor([[0.0, 12.0], [0.0, 0.0]]).t()],
        [torch.tensor([3.0, 4.0, 12.0], dtype=torch.bfloat16)],
        [torch.tensor([3.0, 4.0], dtype=torch.bfloat16), torch.tensor([12.0])],
    ],
)
def test_the_sum_of_squares_over_all(gradients: list[Tensor]) -> None:
    result = squared_norm(gradients, CPU)
    assert float(result) == 169.0
    assert (result.dtype, result.shape) == (torch.float64, ())


def test_an_element_that_comes_twice_in_a_sparse_gradient_is_summed_before_it_is_squared() -> None:
    gradient = sparse([0, 2, 2], [5.0, 6.0, 6.0])
    assert (gradient.is_sparse, gradient.is_coalesced()) == (True, False)
    assert float(squared_norm([gradient], CPU)) == 169.0


def test_no_gradients_have_norm_0() -> None:
    assert squared_norm([], CPU).tolist() == 0.0


def test_a_norm_in_low_precision_is_summed_in_a_higher_one() -> None:
    """In bf16 a sum of ones ends at 256."""
    assert float(squared_norm([torch.ones(100_000, dtype=torch.bfloat16)], CPU)) == pytest.approx(1e5)


def test_gradients_of_one_type_are_read_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several types torch computes one norm after the other."""
    asked, norms = [], torch._foreach_norm

    def spy(gradients: list[Tensor], **options: torch.dtype) -> list[Tensor]:
        asked.append([gradient.dtype for gradient in gradients])
        return norms(gradients, **options)

    monkeypatch.setattr(torch, "_foreach_norm", spy)
    low, wide = torch.bfloat16, torch.float32
    gradients = [torch.ones(4, dtype=dtype) for dtype in (low, wide, low, wide)]
    assert float(squared_norm(gradients, CPU)) == 16.0
    assert asked == [[low, low], [wide, wide]]


@pytest.mark.parametrize(
    ("norm", "limit", "factor"),
    [
        (5.0, None, 1.0),
        (0.5, 1.0, 1.0),
        (1.0 - 1e-6, 1.0, 1.0),
        (4.0, 1.0, 1 / (4 + 1e-6)),
        (math.inf, 1.0, 0.0),
        (0.0, 1.0, 1.0),
    ],
)
def test_gradients_are_scaled_down_and_never_up(norm: float, limit: float | None, factor: float) -> None:
    assert clip_factor(norm, limit) == factor
    assert clip_factor(torch.tensor(norm, dtype=torch.float64), limit) == factor


def test_a_norm_on_the_device_is_not_read() -> None:
    with no_reads():
        factor = clip_factor(torch.tensor(4.0, dtype=torch.float64), 1.0)
    assert factor == 1 / (4 + 1e-6)


def test_a_norm_that_is_no_number_shows() -> None:
    assert math.isnan(clip_factor(math.nan, 1.0))
    assert math.isnan(clip_factor(torch.tensor(math.nan), 1.0))


@pytest.mark.parametrize(("norm", "limit"), [(0.5, 1.0), (1.0, 1.0), (2.0, 1.0), (1e-9, 1e-3), (3.0, 0.0)])
def test_the_factor_is_torchs(norm: float, limit: float) -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.tensor([norm], dtype=torch.float64)
    nn.utils.clip_grad_norm_([parameter], limit)
    assert norm * float(clip_factor(norm, limit)) == pytest.approx(parameter.grad.item(), rel=1e-12)


# Weights that two ranks hold as parts of different models: both make the same update, one counts it.


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
