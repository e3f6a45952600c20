"""Messages between two real ranks: whatever form they have, expected or not, and how many bytes they take."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives import Edge, Edges, Group, Ledger, RecordingGroup, edges_over, group_over
from echelon.engine.step.runtime.message import Gradients, Leaf, Spec
from echelon.engine.step.runtime.wire import Wire
from echelon.launching import Ranks

Warm = Callable[[int], Ranks]
CPU = torch.device("cpu")


def a_wire(*, by_itself: bool = False) -> tuple[Group, Wire]:
    """One group for all, or as over NCCL: one there, one back, and another for heads, in one ledger."""
    ledger = Ledger()
    group = group_over("pipeline", dist.new_group([0, 1]), ledger)
    if not by_itself:
        return group, Wire(edges_over(group, CPU), CPU)
    up, down = (group_over("pipeline", dist.new_group([0, 1]), ledger) for _ in range(2))
    peer = 1 - group.rank
    first, second = (Edge(each, peer, Edge(group, peer)) for each in (up, down))
    ways = (first, second) if group.rank == 0 else (second, first)
    return group, Wire(Edges({peer: ways[0]}, {peer: ways[1]}), CPU)


def values(step: int) -> list[Any]:
    """What is sent in each step: the same form, others, nothing at all, more than once under one key."""
    numbers = torch.arange(12.0) + step
    return [
        [numbers.view(3, 4)],
        [(numbers.view(3, 4), None, {"n": step})],
        [numbers[: step + 1].requires_grad_()],
        [numbers.view(3, 4), numbers.view(4, 3), numbers.view(3, 4).t()],
        [(torch.zeros(0, 3), torch.tensor(7), torch.tensor([True, False]), numbers.to(torch.bfloat16))],
        [{"complex": torch.complex(numbers, -numbers), "text": "ü" * step}],
    ][step % 6]


def exchange(steps: list[int], by_itself: bool) -> list[Any]:
    """Rank 0 sends; rank 1 returns what it received, with the form that was expected."""
    group, wire = a_wire(by_itself=by_itself)
    received = []
    for step in steps:
        wire.start_step()
        for value in values(step):
            if group.rank == 0:
                wire.send(*Spec.of(value), peer=1, key=(0, "look"))
                continue
            posted = wire.post(0, (0, "look"))
            spec, tensors = wire.receive(posted, 0, (0, "look"))
            received.append(
                (posted is not None, spec.rebuild([tensor.clone() for tensor in tensors]), spec.text)
            )
        wire.finish_step(emptied=True)
    return received


@pytest.mark.parametrize("by_itself", [False, True])
def test_any_form_arrives_whatever_was_expected(warm_ranks: Warm, by_itself: bool) -> None:
    steps = [0, 0, 1, 2, 2, 3, 3, 0, 4, 4, 5, 5, 11, 2]
    sent = [value for step in steps for value in values(step)]
    received = warm_ranks(2).run(exchange, steps, by_itself)[1]
    assert len(received) == len(sent)
    assert [expected for expected, _, _ in received] == [False] + [True] * (len(sent) - 1)
    for (_, value, text), original in zip(received, sent, strict=True):
        spec, tensors = Spec.of(original)
        assert text == spec.text
        _, received_tensors = Spec.of(value)
        assert all(
            tensor.dtype == original_tensor.dtype and torch.equal(tensor, original_tensor)
            for tensor, original_tensor in zip(received_tensors, tensors, strict=True)
        )


def counted(shapes: list[list[int]]) -> dict[str, list[int]]:
    """The bytes of every message of one key, tensors of float64 of these shapes, two per step."""
    group, wire = a_wire()
    for shape in shapes:
        wire.start_step()
        for _ in range(2):
            if group.rank == 0:
                wire.send(*Spec.of(torch.ones(shape, dtype=torch.float64)), peer=1, key=(0, ""))
            else:
                wire.receive(wire.post(0, (0, "")), 0, (0, ""))
        wire.finish_step(emptied=True)
    moves = group.ledger.moves
    assert {(move.axis, move.subject) for move in moves} == {("pipeline", "activations")}
    return {
        "sent": [move.traffic.sent for move in moves if move.operation == "send"],
        "received": [move.traffic.received for move in moves if move.operation == "recv"],
    }


def test_the_bytes_follow_from_the_shapes(warm_ranks: Warm) -> None:
    """A message is 8 bytes of code, a flag for each tensor, up to 16, and then each tensor, up to 16."""
    first, second = warm_ranks(2).run(counted, [[3, 5], [3, 5], [2, 5]])
    whole, other = 16 + 3 * 5 * 8, 16 + 2 * 5 * 8
    text, other_text = (len(Spec.of(torch.ones(n, 5).double())[0].text) for n in (3, 2))
    described = [8, text, whole + 8]  # 15 numbers of 8 bytes are 120: up to 128
    expected = [
        *described,  # the first step: nothing is remembered
        *described,  # and what is learned counts from the next step on
        whole + 8,
        whole + 8,
        *[whole + 8, other_text, other],  # the message that was expected says that another form comes
        *[whole + 8, other_text, other],
    ]
    assert first == {"sent": expected, "received": []}
    assert second == {"sent": [], "received": expected}


TALLY = torch.tensor([3.25, 7.0, 14.0], dtype=torch.float64)
LEAVES = [
    Leaf((2, 2), torch.float64, wants_gradient=True),
    Leaf((3,), torch.float32, wants_gradient=True),
    Leaf((), torch.bfloat16, wants_gradient=True),
]


def gradients_of(given: list[Tensor | None], tally: Tensor | None, by_itself: bool) -> tuple[Any, int]:
    group, wire = a_wire(by_itself=by_itself)
    wire.start_step()
    received = None
    if group.rank == 1:
        wire.send_gradients(LEAVES, Gradients(given, tally), peer=0)
    else:
        received = wire.receive_gradients(wire.post_gradients(LEAVES, 1, tally=tally is not None))
    wire.finish_step(emptied=True)
    return received, sum(move.traffic.payload for move in group.ledger.moves)


@pytest.mark.parametrize(
    ("tally", "by_itself", "size"),
    [(None, False, 16 + 32 + 16 + 16), (TALLY, False, 16 + 32 + 32 + 16 + 16), (TALLY, True, 12 + 32 + 64)],
)
def test_gradients_arrive_and_none_stays_none(
    warm_ranks: Warm, tally: Tensor | None, by_itself: bool, size: int
) -> None:
    matrix, number = torch.randn(2, 2).double(), torch.tensor(1.5, dtype=torch.bfloat16)
    (received, moved), _ = warm_ranks(2).run(gradients_of, [matrix, None, number], tally, by_itself)
    assert torch.equal(received.tensors[0], matrix)
    assert received.tensors[1] is None
    assert torch.equal(received.tensors[2], number)
    assert received.tally is None if tally is None else torch.equal(received.tally, tally)
    assert moved == size


def test_gradients_of_nothing_still_tell_the_loss(warm_ranks: Warm) -> None:
    (received, _), _ = warm_ranks(2).run(gradients_of, [None, None, None], TALLY, False)
    assert received.tensors == [None, None, None]
    assert torch.equal(received.tally, TALLY)


def keeps_until_gone() -> tuple[int, int, int]:
    """How many messages the sender holds: before they are taken, after a step that leaves them, after the
    next, which waits for them."""
    group, wire = a_wire()
    one, key = torch.ones(1000), (0, "")
    wire.start_step()
    if group.rank == 0:
        for _ in range(3):
            wire.send(*Spec.of(one), peer=1, key=key)
        held = len(wire._sent)
        wire.finish_step(emptied=False)
        left = len(wire._earlier)
    group.barrier()
    if group.rank == 1:
        for _ in range(3):
            wire.receive(None, 0, key)
        return 0, 0, 0
    wire.start_step()
    wire.finish_step(emptied=False)
    return held, left, len(wire._earlier) + len(wire._sent)


def test_a_step_may_leave_messages_and_the_next_one_waits_for_them(warm_ranks: Warm) -> None:
    held, left, after = warm_ranks(2).run(keeps_until_gone)[0]
    assert held == left > 0
    assert after == 0


def recorded_wire() -> tuple[RecordingGroup, Wire]:
    group = RecordingGroup("pipeline", 0, 2)
    return group, Wire(edges_over(group, CPU), CPU)


def test_a_step_waits_for_every_message_before_their_memory_goes() -> None:
    group, wire = recorded_wire()
    wire.start_step()
    wire.send(*Spec.of(torch.ones(3)), peer=1, key=(0, ""))
    wire.finish_step(emptied=False)
    assert not any(move.wait_start for move in group.ledger.moves), "they may be received in the next step"
    wire.start_step()
    wire.finish_step(emptied=False)
    assert all(move.wait_start for move in group.ledger.moves)
    wire.send(*Spec.of(torch.ones(3)), peer=1, key=(0, ""))
    wire.finish_step(emptied=True)
    assert all(move.wait_start for move in group.ledger.moves)


def test_a_form_is_remembered_when_other_forms_come_between() -> None:
    group, wire = recorded_wire()
    for look in ("training", "evaluation"):
        wire.start_step()
        wire.send(*Spec.of(torch.ones(3)), peer=1, key=(0, look))
        wire.finish_step(emptied=True)
    wire.start_step()
    group.ledger.start_step()
    wire.send(*Spec.of(torch.ones(3)), peer=1, key=(0, "training"))
    assert len(group.ledger.moves) == 1, "without a description"


def test_bytes_from_host_to_host_are_waited_for_a_step_later() -> None:
    group, heads = RecordingGroup("pipeline", 0, 2), RecordingGroup("heads", 0, 2)
    edge = Edge(group, 1, Edge(heads, 1))
    wire = Wire(Edges({1: edge}, {1: edge}), CPU)
    wire.start_step()
    wire.send(*Spec.of(torch.ones(3)), peer=1, key=(0, ""))
    wire.finish_step(emptied=True)
    assert all(move.wait_start for move in group.ledger.moves)
    assert not any(move.wait_start for move in heads.ledger.moves)
    wire.start_step()
    wire.finish_step(emptied=True)
    assert all(move.wait_start for move in heads.ledger.moves)
    assert [move.traffic.sent for move in group.ledger.moves] == [16], "tensors alone"


def test_messages_that_were_received_are_let_go() -> None:
    group, wire = recorded_wire()
    wire.start_step()
    for _ in range(3):
        wire.send(*Spec.of(torch.ones(3)), peer=1, key=(0, ""))
    data = [move for move in group.ledger.moves if move.traffic.payload == 32]
    assert [bool(move.wait_start) for move in data] == [False] * 3
    wire.acknowledge(1, 2)
    assert [bool(move.wait_start) for move in data] == [True, True, False]
    wire.acknowledge(0, 3)
    assert not data[2].wait_start, "of another rank"
    wire.start_step()
    wire.acknowledge(1, 3)
    assert not data[2].wait_start, "of another step"


class GoneMessage:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@pytest.mark.parametrize(("size", "is_used"), [(64, True), (32, False)])
def test_memory_of_a_message_that_is_gone_serves_the_next_of_its_size(size: int, is_used: bool) -> None:
    _, wire = recorded_wire()
    wire.send(*Spec.of(torch.ones(64)), peer=1, key=(0, ""))
    memory = wire._sent[-1][1]
    wire._sent = [(GoneMessage(), memory)]  # type: ignore[list-item]
    leaf = Leaf((size,), torch.float32, wants_gradient=True)
    wire.send_gradients([leaf], Gradients([torch.full((size,), 2.0)]), peer=1)
    ((_, sent),) = wire._sent
    assert (sent is memory) is is_used
