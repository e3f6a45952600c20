"""The rule of readiness: what an instruction needs of its rank, and which ranks it waits for."""

import pytest
from hypothesis import given, settings

from echelon.program import Instruction, Op, Program, build
from echelon.program.instruction import RECEIVES, SENDS
from echelon.program.readiness import GRADIENT, Need, Position, counterpart, needs, partners, walk
from tests.program.cases import Shape, program_of, shapes


def test_each_instruction_has_needs_on_its_own_rank() -> None:
    program = build("interleaved", (1, 1), 2, 2)  # stages 0 and 2 on rank 0, 1 and 3 on rank 1
    assert needs(program, 0, Instruction(Op.FORWARD, 0, 1)) == []
    assert needs(program, 0, Instruction(Op.FORWARD, 2, 1)) == [Need((Op.RECV_ACTIVATION,), 2)]
    assert needs(program, 0, Instruction(Op.BACKWARD, 2, 1)) == [
        Need((Op.FORWARD,), 2),
        Need((Op.RECV_GRADIENT,), 2),
    ]
    assert needs(program, 1, Instruction(Op.BACKWARD_INPUT, 3, 1)) == [Need((Op.FORWARD,), 3)]
    assert needs(program, 1, Instruction(Op.BACKWARD_WEIGHT, 3, 1)) == [Need((Op.BACKWARD_INPUT,), 3)]
    assert needs(program, 0, Instruction(Op.SEND_GRADIENT, 2, 1)) == [Need(GRADIENT, 2)]
    assert needs(program, 0, Instruction(Op.RECV_GRADIENT, 2, 1, 1)) == []
    assert needs(program, 0, Instruction(Op.UPDATE)) == []


def test_neighbouring_stages_on_one_rank_need_no_transfer() -> None:
    program = program_of("stage 0: 0\nstage 1: 0\nrank 0: F0@0 F0@1 B0@1 B0@0")
    assert needs(program, 0, Instruction(Op.FORWARD, 1, 0)) == [Need((Op.FORWARD,), 0)]
    assert needs(program, 0, Instruction(Op.BACKWARD, 0, 0))[1] == Need(GRADIENT, 1)


def test_a_send_and_its_receive_are_each_others_counterpart() -> None:
    send = Instruction(Op.SEND_ACTIVATION, 2, 5, peer=7)
    assert counterpart(4, send) == Instruction(Op.RECV_ACTIVATION, 3, 5, peer=4)
    assert counterpart(7, counterpart(4, send)) == send
    back = Instruction(Op.SEND_GRADIENT, 2, 5, peer=1)
    assert counterpart(1, counterpart(4, back)) == back


def reached(program: Program) -> list[Position]:
    return [(rank, index) for rank, index, _ in walk(program)]


@settings(deadline=None)
@given(shapes())
def test_every_instruction_is_walked_once_and_after_what_it_waits_for(shape: Shape) -> None:
    program = shape.program()
    done: set[tuple[int, int]] = set()
    for rank, index, causes in walk(program):
        instruction = program.ranks[rank][index]
        assert index == 0 or (rank, index - 1) in done
        assert done.issuperset(causes)
        if instruction.op in RECEIVES:
            ((sender, sent),) = causes
            assert counterpart(sender, program.ranks[sender][sent]) == instruction
        elif instruction.op in SENDS:
            assert causes == ()
        done.add((rank, index))
    assert len(done) == sum(map(len, program.ranks))


def test_replicas_meet_at_each_reduce() -> None:
    program = program_of(
        "stage 0: 0 1 2\nrank 0: F0 REDUCE F3 REDUCE\nrank 1: F1 REDUCE REDUCE\nrank 2: REDUCE F2"
    )
    # All pass the first REDUCE; rank 2 never comes to a second, at which the others stay.
    assert sorted(reached(program)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("op", ["NORM", "TIE"])
def test_all_ranks_that_hold_a_stage_meet_at_each_norm_and_tie(op: str) -> None:
    text = f"stage 0: 0\nstage 1: 1\nrank 0: F0 {op} F1 {op} B0\nrank 1: {op} F0\nrank 2:"
    program = program_of(text)
    # Rank 1 has no second one: rank 0 stays at its own.
    assert sorted(reached(program)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    causes = {(rank, index): waited for rank, index, waited in walk(program)}
    assert causes[0, 1] is causes[1, 0] == ((0, 0),)


def test_with_weight_versions_a_norm_waits_for_nobody() -> None:
    program = program_of("rank 0: F0v0 NORM F1 NORM\nrank 1: F0")
    assert [event for event in walk(program) if event[0] == 0] == [(0, index, ()) for index in range(4)]


def test_partners_are_the_replicas_of_a_stage_or_all_ranks_with_a_stage() -> None:
    program = program_of("stage 0: 0 2\nstage 1: 1\nrank 0:\nrank 1:\nrank 2:\nrank 3:")
    assert partners(program, Op.REDUCE, 0) == {0, 2}
    assert partners(program, Op.REDUCE, 1) == {1}
    assert partners(program, Op.NORM, 0) == partners(program, Op.TIE, 0) == {0, 1, 2}


def test_a_rank_that_waits_forever_stays_behind_and_stops_no_other() -> None:
    program = program_of("rank 0: RG0<1 F0\nrank 1: F0\nrank 2: F0 F1")
    assert reached(program) == [(1, 0), (2, 0), (2, 1)]
