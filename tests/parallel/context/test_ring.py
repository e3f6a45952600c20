"""Ring attention over real processes, in float64, against torch's attention over the whole sequence."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from echelon.collectives import Group, Ledger, RecordingGroup, TorchGroup
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.parallel.context import put_together, ring, ring_attention, take
from echelon.parallel.context.blocks import Gradients, QueryState, add_gradients, attend
from echelon.parallel.context.ring import (
    LEFT,
    RIGHT,
    WAYS,
    Message,
    ReturningGradients,
    reach,
    rounds,
    start_exchange,
)
from echelon.plan import Plan
from tests.nccl_like import NcclWorld
from tests.peak_memory import PeakMemory

Warm = Callable[[int], Ranks]


@dataclass(frozen=True)
class Case:
    ranks: int
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    chunk: int = 3
    width: int = 8
    scale: float | None = None
    dtype: torch.dtype = torch.float64

    def whole(self) -> list[Tensor]:
        """Query, key, value and the gradient of the result."""
        draw = torch.Generator().manual_seed(7)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, each, 2 * self.ranks * self.chunk, self.width) for each in heads]
        return [torch.randn(shape, dtype=torch.float64, generator=draw).to(self.dtype) for shape in shapes]

    def wanted(self) -> list[Tensor]:
        """The result, and the gradients of query, key and value."""
        *inputs, gradient = self.whole()
        query, key, value = (x.double().requires_grad_() for x in inputs)
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
        )
        out.backward(gradient)
        return [out.detach(), *(_grad(x) for x in (query, key, value))]


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def context(ranks: int) -> Group:
    return Mesh.join(Plan(context=ranks)).group("context")


def parts_of(case: Case, group: Group) -> tuple[list[Tensor], Tensor]:
    *inputs, gradient = (take(x, group.rank, group.size, dim=2) for x in case.whole())
    return [x.requires_grad_() for x in inputs], gradient


def attended(case: Case) -> list[Tensor]:
    """This rank's part of the result and of the gradients."""
    inputs, gradient = parts_of(case, group := context(case.ranks))
    out = ring_attention(*inputs, group, case.scale)
    out.backward(gradient)
    return [out.detach(), *(_grad(x) for x in inputs)]


def differences(case: Case, by_rank: list[list[Tensor]]) -> list[float]:
    results = [put_together(parts, dim=2) for parts in zip(*by_rank, strict=True)]
    return [float((x - y).abs().max()) for x, y in zip(results, case.wanted(), strict=True)]


SHAPES = {
    "grouped": {},
    "one for all": {"kv_heads": 1, "batch": 3},
    "each its own": {"kv_heads": 4},
    "chunks of one": {"chunk": 1, "batch": 3},
    "one head": {"heads": 1, "kv_heads": 1, "width": 1, "chunk": 5},
    "scaled": {"scale": 1.7, "heads": 6, "kv_heads": 3},
}


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_is_attention_over_the_whole_sequence(warm_ranks: Warm, ranks: int, shape: dict[str, int]) -> None:
    case = Case(ranks, **shape)  # type: ignore[arg-type]
    by_rank = warm_ranks(ranks).run(attended, case) if ranks > 1 else [attended(case)]
    assert max(differences(case, by_rank)) <= 1e-12


def test_one_rank_takes_a_sequence_of_any_length() -> None:
    query, key, value = (x[:, :, :5] for x in Case(1).whole()[:3])
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    out = ring_attention(query, key, value, RecordingGroup("context"))
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-13)


def test_queries_are_copied_once_and_not_for_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other ranks of the ring hold later keys: they are attended to by the second half of the queries."""
    seen: dict[str, list[Tensor]] = {"forward": [], "backward": []}

    def attend_and_note(query: Tensor, *others: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        seen["forward"].append(query)
        return attend(query, *others, **options)

    def add_and_note(into: Gradients, queries: QueryState, *others: Tensor, **options: Any) -> None:
        seen["backward"].append(queries.query)
        add_gradients(into, queries, *others, **options)

    monkeypatch.setattr(ring, "attend", attend_and_note)
    monkeypatch.setattr(ring, "add_gradients", add_and_note)
    shapes = [(2, 6, heads, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes]
    ring_attention(*inputs, RecordingGroup("context", 0, 5)).sum().backward()
    for queries in seen.values():
        assert len(queries) == 5
        assert len({query.data_ptr() for query in queries}) == 2
        assert all(query.is_contiguous() for query in queries)


@pytest.mark.slow_cases("3")
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_larger_than_any_buffer_do_not_block_the_ring(warm_ranks: Warm, ranks: int) -> None:
    case = Case(ranks, heads=2, kv_heads=2, chunk=300, width=256)  # 2.4 MB per message
    assert max(differences(case, warm_ranks(ranks).run(attended, case))) <= 1e-12


def over_gloo(case: Case) -> list[Tensor]:
    assert dist.group.WORLD is not None
    group = TorchGroup("context", dist.group.WORLD, Ledger())
    inputs, gradient = parts_of(case, group)
    out = ring_attention(*inputs, group)
    out.backward(gradient)
    return [out.detach(), *(_grad(x) for x in inputs)]


@pytest.mark.slow_cases("3")
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_group_will_do(warm_ranks: Warm, ranks: int) -> None:
    case = Case(ranks, chunk=300, width=64)
    assert max(differences(case, warm_ranks(ranks).run(over_gloo, case))) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types(warm_ranks: Warm, dtype: torch.dtype) -> None:
    case = Case(3, dtype=dtype)
    by_rank = warm_ranks(3).run(attended, case)
    assert {x.dtype for x in by_rank[0]} == {dtype}
    assert max(differences(case, by_rank)) <= 20 * torch.finfo(dtype).eps


def under_autocast(case: Case) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return attended(case)


def test_autocast_does_not_narrow_what_is_computed(warm_ranks: Warm) -> None:
    case = Case(2, dtype=torch.float32)
    assert max(differences(case, warm_ranks(2).run(under_autocast, case))) <= 20 * torch.finfo().eps


# --- gradients ----------------------------------------------------------------------------------------


def test_gradcheck_on_one_rank() -> None:
    inputs = [x.requires_grad_() for x in Case(1, heads=2, kv_heads=1, width=2).whole()[:3]]
    assert torch.autograd.gradcheck(lambda *x: ring_attention(*x, RecordingGroup("context")), inputs)


def slopes(case: Case) -> tuple[float, float]:
    """How much this rank's part of the loss grows along a direction, by gradients and by differences."""
    inputs, weights = parts_of(case, group := context(case.ranks))
    draw = torch.Generator().manual_seed(group.rank)
    directions = [torch.randn(x.shape, dtype=x.dtype, generator=draw) for x in inputs]

    def loss(step: float) -> Tensor:
        moved = [x + step * way for x, way in zip(inputs, directions, strict=True)]
        return (ring_attention(*moved, group) * weights).sum()

    loss(0.0).backward()
    by_gradients = sum(float((_grad(x) * way).sum()) for x, way in zip(inputs, directions, strict=True))
    with torch.no_grad():
        return by_gradients, float(loss(1e-5) - loss(-1e-5)) / 2e-5


def test_gradients_are_slopes_of_the_sum_over_ranks(warm_ranks: Warm) -> None:
    by_gradients, by_differences = map(sum, zip(*warm_ranks(3).run(slopes, Case(3)), strict=True))
    assert by_gradients == pytest.approx(by_differences, rel=1e-7)


def partly(case: Case, needing: list[bool]) -> tuple[list[Tensor | None], int]:
    """Gradients where only some inputs need one, and the bytes that the backward pass sent."""
    inputs, gradient = parts_of(case, group := context(case.ranks))
    inputs = [x.detach().requires_grad_(needs) for x, needs in zip(inputs, needing, strict=True)]
    out = ring_attention(*inputs, group)
    before = group.ledger.total("context").sent
    out.backward(gradient)
    return [x.grad for x in inputs], group.ledger.total("context").sent - before


@pytest.mark.parametrize("needing", [[True, False, False], [False, True, False], [False, False, True]])
def test_only_what_is_needed_comes_back(warm_ranks: Warm, needing: list[bool]) -> None:
    case = Case(2)
    found, sent = zip(*warm_ranks(2).run(partly, case, needing), strict=True)
    (which,) = (index for index, needs in enumerate(needing) if needs)
    assert all((x is not None) == needs for parts in found for x, needs in zip(parts, needing, strict=True))
    whole = put_together([parts[which] for parts in found], dim=2)
    torch.testing.assert_close(whole, case.wanted()[1 + which], rtol=0, atol=1e-12)
    keys_and_values = 2 * case.kv_heads * 2 * case.chunk * case.width * 8
    assert sent == (keys_and_values if needing[0] else 2 * keys_and_values,) * 2


def used_twice(case: Case) -> list[Tensor]:
    """One tensor is query, key and value, in two attentions of which one follows the other."""
    inputs, gradient = parts_of(case, group := context(case.ranks))
    x = inputs[0]
    once = ring_attention(x, x, x, group)
    twice = ring_attention(once, x, once * 2, group)
    twice.backward(gradient, retain_graph=True)
    twice.backward(gradient)
    return [twice.detach(), _grad(x)]


def test_a_tensor_may_be_used_many_times(warm_ranks: Warm) -> None:
    case = Case(3, kv_heads=4)
    x, *_, gradient = case.whole()
    x.requires_grad_()
    once = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    twice = F.scaled_dot_product_attention(once, x, once * 2, is_causal=True)
    twice.backward(2 * gradient)
    out, grad = (put_together(parts, 2) for parts in zip(*warm_ranks(3).run(used_twice, case), strict=True))
    torch.testing.assert_close(out, twice.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(grad, _grad(x), rtol=0, atol=1e-12)


def test_what_was_changed_in_place_is_noticed() -> None:
    for changed in range(4):
        inputs = [x.requires_grad_() for x in Case(1).whole()[:3]]
        copies = [x.clone() for x in inputs]
        out = ring_attention(*copies, RecordingGroup("context"))
        (*copies, out)[changed].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_there_is_no_second_derivative() -> None:
    inputs = [x.requires_grad_() for x in Case(1).whole()[:3]]
    out = ring_attention(*inputs, RecordingGroup("context"))
    (first,) = torch.autograd.grad((out**2).sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_only_query_key_value_result_and_sums_are_kept() -> None:
    inputs = [x.requires_grad_() for x in Case(1).whole()[:3]]
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = ring_attention(*inputs, RecordingGroup("context"))
    assert [x.shape for x in kept] == [*(x.shape for x in inputs), out.shape, out.shape[:-1]]


def inputs_unchanged(case: Case) -> bool:
    inputs, gradient = parts_of(case, group := context(case.ranks))
    before = [x.detach().clone() for x in (*inputs, gradient)]
    ring_attention(*inputs, group).backward(gradient)
    return all(torch.equal(x, y) for x, y in zip((*inputs, gradient), before, strict=True))


def test_inputs_are_not_changed(warm_ranks: Warm) -> None:
    assert all(warm_ranks(2).run(inputs_unchanged, Case(2)))


# --- bytes and bits -----------------------------------------------------------------------------------


def traffic(case: Case) -> list[tuple[int, int, int]]:
    """Messages and bytes each way under the subject `context`, of the forward and of the backward pass."""
    inputs, gradient = parts_of(case, group := context(case.ranks))
    out = ring_attention(*inputs, group)
    forward = group.ledger.total("context", subject="context")
    out.backward(gradient)
    both = group.ledger.total("context", subject="context")
    assert both == group.ledger.total()  # and nothing under another
    return [
        (forward.count, forward.sent, forward.received),
        (both.count - forward.count, both.sent - forward.sent, both.received - forward.received),
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ledger_has_the_bytes_of_the_formula(warm_ranks: Warm, ranks: int, dtype: torch.dtype) -> None:
    case = Case(ranks, batch=3, dtype=dtype)
    numbers = 2 * case.batch * case.kv_heads * 2 * case.chunk * case.width  # in keys and values of a rank
    k, g = numbers * dtype.itemsize, numbers * max(4, dtype.itemsize)
    hops, rounds = ranks - 1, ranks // 2  # messages of both directions are one operation
    forward = (rounds, hops * k, hops * k)
    backward = (2 * rounds, hops * (k + g), hops * (k + g))
    assert warm_ranks(ranks).run(traffic, case) == [[forward, backward]] * ranks


def test_one_rank_sends_nothing() -> None:
    group = RecordingGroup("context")
    ring_attention(*Case(1).whole()[:3], group)
    assert group.ledger.total().count == 0


def test_every_run_has_the_same_bits(warm_ranks: Warm) -> None:
    case = Case(3, chunk=40, dtype=torch.float32)
    first, *others = (warm_ranks(3).run(attended, case) for _ in range(3))
    for other in others:
        assert all(
            torch.equal(x, y) for a, b in zip(first, other, strict=True) for x, y in zip(a, b, strict=True)
        )


# --- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 4, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8)), "4 heads are not divisible by 3 key/value heads"),
        (((1, 4, 4, 8), (1, 2, 4, 8), (1, 4, 4, 8)), "key and value of the same shape"),
        (((4, 4, 8), (4, 4, 8), (4, 4, 8)), r"all must be \[batch, heads, sequence, width\]"),
        (((1, 4, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8)), "only the number of heads may differ"),
        (((1, 4, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8)), "a sequence of 6 positions with context=2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ring_attention(*map(torch.zeros, shapes), RecordingGroup("context", 0, 2))


def test_all_errors_are_reported_at_once() -> None:
    query, key, value = replace(Case(1), heads=3).whole()[:3]
    with pytest.raises(UserError, match=r"2 errors(.|\n)*not divisible by 2(.|\n)*torch.float64.*one dtype"):
        ring_attention(query.float(), key, value, RecordingGroup("context"))


# Messages around a ring in both directions: who gets what in which round, and when it travels.


def sources(ranks: int) -> list[list[list[int]]]:
    """By rank and round: the sources, and what they sent must be theirs."""
    world = NcclWorld(ranks)

    def run(rank: int) -> list[list[int]]:
        group = world.group("context", range(ranks), rank)
        own = torch.full((2,), rank)
        return [[_checked(*block[1:]) for block in blocks] for blocks in rounds(group, own)]

    return world.run(run)


def _checked(source: int, tensor: Tensor) -> int:
    assert tensor.tolist() == [source, source]
    return source


def test_blocks_come_from_both_sides() -> None:
    assert sources(5)[:2] == [[[0], [4, 1], [3, 2]], [[1], [0, 2], [4, 3]]]
    assert sources(4)[:2] == [[[0], [3, 1], [2]], [[1], [0, 2], [3]]]
    assert sources(2) == [[[0], [1]], [[1], [0]]]
    assert sources(1) == [[[0]]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_every_block_comes_once_and_half_of_them_each_way(ranks: int) -> None:
    for rank, by_round in enumerate(sources(ranks)):
        assert sorted(source for blocks in by_round for source in blocks) == list(range(ranks)), rank
    assert reach(ranks, RIGHT) + reach(ranks, LEFT) == ranks - 1
    assert reach(ranks, RIGHT) - reach(ranks, LEFT) in (0, 1)


def test_the_next_blocks_travel_while_some_are_used() -> None:
    group = RecordingGroup("context", rank=1, size=5)
    seen = [
        ([block.source for block in blocks], len(group.ledger.moves)) for blocks in rounds(group, _ones())
    ]
    assert seen == [([1], 1), ([0, 2], 2), ([4, 3], 2)]
    assert [move.traffic.sent for move in group.ledger.moves] == [2 * _ones().nbytes] * 2


def _ones() -> Tensor:
    return torch.ones(2)


def test_two_messages_between_two_ranks_keep_their_order() -> None:
    """Of gradients in a ring of 4: one goes on to the neighbour, the other one belongs to it."""
    world = NcclWorld(4)

    def run(rank: int) -> list[float]:
        group: Group = world.group("context", range(4), rank)
        right, left = (rank + 1) % 4, (rank - 1) % 4
        messages = [Message(torch.tensor([10.0 * rank + which]), right, left) for which in range(2)]
        return [tensor.item() for tensor in start_exchange(group, messages).wait()]

    assert world.run(run) == [[30.0, 31.0], [0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]


def test_a_tensor_is_kept_until_it_is_sent() -> None:
    tensor = torch.zeros(2)
    exchange = start_exchange(RecordingGroup("context", 0, 2), [Message(tensor, 1, 1)])
    assert exchange.outgoing.data_ptr() == tensor.data_ptr()


def test_what_was_sent_is_freed() -> None:
    """Beside a rank's own tensor there are two that it uses, two that it sends and two that come."""
    own = torch.ones(1000)
    with PeakMemory() as memory:
        for blocks in rounds(RecordingGroup("context", 0, 8), own):
            del blocks
    assert memory.peak == 6 * own.nbytes


# Gradients that travel to the owner of their block: all parts arrive, each once.


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7])
def test_the_owner_has_the_parts_of_all_ranks(ranks: int) -> None:
    """Rank r's part for the block of rank s is 1 in row r: an owner must end with 1 in every row."""
    world = NcclWorld(ranks)

    def part(rank: int, source: int) -> torch.Tensor:
        parts = torch.zeros(ranks, ranks)
        parts[rank, source] = 1
        return parts

    def run(rank: int) -> torch.Tensor:
        group = world.group("context", range(ranks), rank)
        returning = ReturningGradients(group, part(rank, rank))
        for blocks in list(rounds(group, torch.zeros(1)))[1:]:
            returning.add({block.way: part(rank, block.source) for block in blocks})
        return returning.finish()

    for rank, gradients in enumerate(world.run(run)):
        expected = torch.zeros(ranks, ranks)
        expected[:, rank] = 1
        assert torch.equal(gradients, expected)


def test_gradients_that_were_sent_are_freed() -> None:
    """Beside a rank's own gradients there are two that it has computed, two that go and two that come."""
    ranks, own = 9, torch.ones(1000)
    returning = ReturningGradients(RecordingGroup("context", 0, ranks), own)
    with PeakMemory() as memory:
        for _ in range(reach(ranks, RIGHT)):
            returning.add({way: torch.zeros(1000) for way in WAYS})
        returning.finish()
    assert memory.peak == 6 * own.nbytes
