"""Rows of slots to other ranks and back, without ranks."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Ledger, RecordingGroup
from echelon.nn.experts import Experts
from echelon.nn.experts.rows import sort_slots
from echelon.parallel.expert.modules import (
    Dispatch,
    RowExchange,
    SpreadExperts,
    _Start,
    _Wait,
    counts_of,
    inverse_of,
    mix_rows,
    permute,
    plan_dispatch,
    take_rows,
)

INDICES = torch.tensor([[2, 0], [0, 3], [1, 2]])  # of 3 experts: one slot is dropped


def test_rows_of_slots_and_their_gradients() -> None:
    slots = sort_slots(INDICES, 3)
    assert counts_of(slots).tolist() == [2, 1, 2]
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    rows = take_rows(x, slots, 5)
    assert torch.equal(rows, x[[0, 1, 2, 0, 2]])
    weights = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    mixed = mix_rows(rows * 2, weights, slots)
    kept = weights * torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]]).double()
    expected = 2 * x * kept.sum(1, keepdim=True)
    assert torch.allclose(mixed, expected, atol=1e-14)
    gradient = torch.randn(3, 4, dtype=torch.float64)
    for found, wanted in zip(
        torch.autograd.grad(mixed, [x, weights], gradient, retain_graph=True),
        torch.autograd.grad(expected, [x, weights], gradient),
        strict=True,
    ):
        assert torch.allclose(found, wanted, atol=1e-14)
    (only_x,) = torch.autograd.grad(mix_rows(rows * 2, weights.detach(), slots), [x], gradient)
    assert torch.allclose(only_x, 2 * gradient * kept.sum(1, keepdim=True), atol=1e-14)


def test_no_slot_is_dropped() -> None:
    slots = sort_slots(torch.tensor([[1], [0]]), 2)
    x = torch.arange(4.0).view(2, 2)
    assert torch.equal(take_rows(x, slots, 2), x[[1, 0]])
    assert torch.equal(
        mix_rows(x[[1, 0]], torch.tensor([[2.0], [3.0]]), slots), x * torch.tensor([[2.0], [3.0]])
    )


def test_a_permutation_and_its_gradient() -> None:
    order = torch.tensor([2, 0, 1])
    rows = torch.randn(3, 2, requires_grad=True)
    assert inverse_of(order).tolist() == [1, 2, 0]
    permuted = permute(rows, order, inverse_of(order))
    assert torch.equal(permuted, rows[order])
    (gradient,) = torch.autograd.grad(permuted, [rows], torch.arange(6.0).view(3, 2))
    assert torch.equal(gradient[order], torch.arange(6.0).view(3, 2))


class Handle:
    def __init__(self, group: "Mirror") -> None:
        self._group = group

    def wait(self) -> None:
        self._group.log.append("wait")


class Mirror:
    """A group of two ranks, of which the other sends the negative of what it gets."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.ledger, self.log = Ledger(), list[Any]()

    def all_to_all(
        self, incoming: Tensor, outgoing: Tensor, from_all: Any = None, to_all: Any = None, wait: bool = True
    ) -> Handle:
        self.log.append((from_all, to_all, wait))
        flat = -outgoing.flatten().repeat(incoming.numel() // max(outgoing.numel(), 1) + 1)
        incoming.copy_(flat[: incoming.numel()].view_as(incoming))
        return Handle(self)


def test_rows_travel_while_other_work_runs_and_gradients_come_back() -> None:
    group: Any = Mirror()
    exchange = RowExchange(group, [1, 2], [2, 0])
    rows = torch.arange(6.0).view(3, 2).requires_grad_()
    arriving = exchange.start(rows)
    assert group.log == [([2, 0], [1, 2], False)]
    arrived = exchange.wait(arriving)
    assert group.log[1:] == ["wait"]
    assert arrived.tolist() == [[0.0, -1.0], [-2.0, -3.0]]
    group.log.clear()
    arrived.backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert group.log == [([1, 2], [2, 0], False), "wait"], "as many rows as were sent come back"
    assert rows.grad is not None
    assert rows.grad.tolist() == [[-1.0, -2.0], [-3.0, -4.0], [-1.0, -2.0]]
    back = exchange.reversed()
    assert (back._sent, back._received) == ([2, 0], [1, 2])
    assert _Start.runs_once
    assert _Wait.runs_once


def test_ranks_tell_each_other_how_many_rows_come() -> None:
    group: Any = Mirror()
    counts = -torch.tensor([1, 2, 3, 4])  # the other answers with the negative
    dispatch = plan_dispatch(counts, group)
    assert (dispatch.sent, dispatch.received) == (-10, 10)
    assert dispatch.counts.tolist() == [[1, 2], [3, 4]]
    assert (dispatch.exchange._sent, dispatch.exchange._received) == ([-3, -7], [3, 7])
    numbers = Dispatch(dispatch.exchange, 0, 10, dispatch.counts).expert_of_row
    assert numbers.tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 1, 1]


# A rank that gets no row returns none, of the form that the others return theirs in.


class Wider(nn.Module):
    """Experts that return more columns than they get, of another type, and cannot be called without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 2
        self.up_proj = nn.Parameter(torch.randn(2, 4, 6))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        assert len(hidden_states)
        computed = torch.einsum("tw,two->to", hidden_states, self.up_proj[top_k_index[:, 0]])
        return (computed * top_k_weights).double()


def computed(module: nn.Module, number: int) -> tuple[Tensor, Tensor]:
    """What a rank makes of `number` rows for its second expert, and the rows."""
    group = RecordingGroup("expert", 0, 2)
    counts = torch.tensor([[0, number], [0, 0]])
    rows = torch.randn(number, 4, requires_grad=True)
    spread = SpreadExperts(module, group, 4)
    return spread._compute(rows, Dispatch(cast(RowExchange, None), 0, number, counts)), rows


@pytest.mark.parametrize("has_autocast", [False, True])
@pytest.mark.parametrize("make", [lambda: Experts(2, 4, 3), Wider])
def test_no_rows_have_the_type_and_width_of_some(make: type[nn.Module], has_autocast: bool) -> None:
    module = make()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_autocast):
        some, _ = computed(module, 3)
        none, rows = computed(module, 0)
    assert some.dtype == (
        torch.float64 if make is Wider else torch.bfloat16 if has_autocast else torch.float32
    )
    assert (none.dtype, none.shape) == (some.dtype, (0, some.shape[1]))
    none.sum().backward()
    assert rows.grad is not None
    assert rows.grad.shape == (0, 4)
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
