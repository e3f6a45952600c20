"""The one rule of readiness: what an instruction needs of its rank, and whom it waits for."""

from hypothesis import given, settings

from echelon.program import Instruction, Op, build
from echelon.program.instruction import RECEIVES, SENDS
from echelon.program.readiness import GRADIENT, Need, counterpart, needs, walk
from tests.program.cases import Shape, program_of, shapes


def test_what_each_instruction_needs_of_its_own_rank() -> None:
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


@settings(deadline=None)
@given(shapes())
def test_every_instruction_is_walked_once_and_after_what_it_waits_for(shape: Shape) -> None:
    program = shape.program()
    done: set[tuple[int, int]] = set()
    for rank, place, causes in walk(program):
        its = program.ranks[rank][place]
        assert place == 0 or (rank, place - 1) in done
        assert done.issuperset(causes)
        if its.op in RECEIVES:
            ((sender, at),) = causes
            assert counterpart(sender, program.ranks[sender][at]) == its
        elif its.op in SENDS:
            assert causes == ()
        done.add((rank, place))
    assert len(done) == sum(map(len, program.ranks))


def test_replicas_meet_at_each_reduce() -> None:
    program = program_of(
        "stage 0: 0 1 2\nrank 0: F0 REDUCE F3 REDUCE\nrank 1: F1 REDUCE REDUCE\nrank 2: REDUCE F2"
    )
    seen = [(rank, place) for rank, place, _ in walk(program)]
    assert sorted(seen) == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]  # the second one never meets


def test_a_rank_that_waits_for_ever_stays_behind_and_stops_no_other() -> None:
    program = program_of("rank 0: RG0<1 F0\nrank 1: F0\nrank 2: F0 F1")
    assert [(rank, place) for rank, place, _ in walk(program)] == [(1, 0), (2, 0), (2, 1)]
