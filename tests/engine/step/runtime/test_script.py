"""What the interpreter must know of a rank's instructions before it runs them."""

import dataclasses

import pytest

from echelon.engine.step.runtime.script import Script
from echelon.program import (
    AFTER_FORWARDS,
    RECEIVES,
    SENDS,
    Instruction,
    Op,
    Program,
    add_transfers,
    asynchronous,
    build,
)


def test_a_gradient_says_that_its_activation_was_received() -> None:
    program = build("1f1b", (1, 1), microbatches=4)
    assert Script(program, 0).acknowledged == {1: [1, 2, 3, 4]}
    assert Script(program, 1).acknowledged == {0: [0, 0, 1, 2]}, "two forwards before the first backward"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "naive"])
@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (3, 1), (2, 1, 1)])
def test_no_message_is_acknowledged_before_it_was_sent(schedule: str, replicas: tuple[int, ...]) -> None:
    program = build(schedule, replicas, microbatches=6)
    for rank in range(len(program.ranks)):
        script = Script(program, rank)
        sent, received = dict.fromkeys(script.receives, 0), dict.fromkeys(script.receives, 0)
        for instruction in script.instructions:
            if instruction.op in SENDS:
                sent[instruction.peer] = sent.get(instruction.peer, 0) + 1
            elif instruction.op in RECEIVES:
                counts = script.acknowledged[instruction.peer]
                assert counts[received[instruction.peer]] <= sent.get(instruction.peer, 0)
                received[instruction.peer] += 1
        assert all(received[peer] == len(counts) for peer, counts in script.acknowledged.items())


def continuous(begin: int, taken: int) -> Program:
    """A step of PipeDream on two stages with two microbatches a step, or (`taken` is 0) its drain."""
    return add_transfers(asynchronous("pipedream", 2, 2, begin=begin, taken=taken, drain=taken == 0))


def test_what_is_in_flight_between_the_steps_of_a_pipeline_that_never_drains() -> None:
    full, drain = continuous(begin=6, taken=2), continuous(begin=6, taken=0)
    receive = Instruction(Op.RECV_GRADIENT, 0, microbatch=7, peer=1)
    assert Script(full, 0).in_flight == {1: [receive]}
    assert Script(full, 1).in_flight == Script(drain, 0).in_flight == {}
    assert Script(build("1f1b", (1, 1), microbatches=4), 0).in_flight == {}


def test_messages_of_the_step_before_acknowledge_nothing_of_this_one() -> None:
    """Rank 0 does F6 B5 F7 B6: it receives the gradients of 5, which is on its way, and of 6."""
    program = continuous(begin=6, taken=2)
    first, second = Script(program, 0), Script(program, 1)
    assert first.acknowledged == {1: [0, 1, 2]}, "the third is received in the next step"
    assert second.acknowledged == {0: [0, 0]}, "what rank 0 receives first was sent in the step before"


def test_a_replica_with_fewer_microbatches_makes_up_for_them() -> None:
    """Where replicas talk in every backward pass, each runs as many as the busiest."""
    program = build("1f1b", (2, 1), 3)
    assert [Script(program, rank).missing_rounds(0) for rank in (0, 1)] == [0, 1]
    assert Script(program, 2).missing_rounds(1) == 0


def test_what_a_step_on_two_stages_is_made_of() -> None:
    program = build("1f1b", (1, 1), microbatches=2)
    script = Script(program, 0)
    ops = [instruction.op for instruction in script.instructions]
    assert not script.splits_backward
    assert Script(build("zero-bubble", (1, 1), microbatches=2), 0).splits_backward
    assert script.first_backward is not None
    assert (
        ops[script.first_backward] in AFTER_FORWARDS,
        set(ops[: script.first_backward]) & AFTER_FORWARDS,
    ) == (True, set())
    (last,) = script.lasts
    backwards = [place for place, op in enumerate(ops) if op is Op.BACKWARD]
    assert last == backwards[-1]
    receives = [instruction for instruction in script.instructions if instruction.op in RECEIVES]
    assert script.receives == {1: receives}
    assert (script.rank, script.empties, len(script.labels)) == (0, True, len(ops))
    place = ops.index(Op.BACKWARD)
    assert script.labels[place] == f"{Op.BACKWARD.value}0 of stage 0, microbatch 0"
    assert script.labels[ops.index(Op.REDUCE)] == f"{Op.REDUCE.value} of stage 0"


def test_the_last_backward_of_each_stage_reduces_its_gradients() -> None:
    """With weights computed apart, that is the last of those."""
    for schedule in ("1f1b", "gpipe", "zero-bubble"):
        program = build(schedule, (1, 1), microbatches=3)
        for rank in (0, 1):
            script = Script(program, rank)
            kinds = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
            places = [place for place, i in enumerate(script.instructions) if i.op in kinds]
            assert script.lasts == {places[-1]}


def test_forwards_alone_have_no_turn() -> None:
    full = build("1f1b", (1,), microbatches=2)
    forwards = tuple(instruction for instruction in full.ranks[0] if instruction.op is Op.FORWARD)
    script = Script(dataclasses.replace(full, ranks=(forwards,)), 0, empties=False)
    assert (script.first_backward, script.lasts, script.receives, script.empties) == (
        None,
        frozenset(),
        {},
        False,
    )
