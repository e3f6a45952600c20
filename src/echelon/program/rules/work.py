"""Rules of the work: each instruction belongs to its rank, each computation stands once, after its needs."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from echelon.program.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Op, Program
from echelon.program.readiness import GRADIENT, Need, counterpart, needs
from echelon.program.rules.error import ProgramError, name

_MOST_NAMED = 5  # of things that are missing
_TRANSFERS = SENDS | RECEIVES
_OF_MICROBATCHES = COMPUTE | _TRANSFERS


def placed(program: Program) -> Iterator[ProgramError]:
    """Every instruction is whole, and about a stage and a microbatch that are its rank's own."""
    for stage, ranks in enumerate(program.placement):
        if not ranks or not set(ranks) <= set(range(len(program.ranks))):
            yield ProgramError(
                0, None, f"stage {stage} is on ranks {list(ranks)}, of {len(program.ranks)} that there are"
            )
            return
    numbers, turn = range(program.microbatches), program.round
    for rank, instructions in enumerate(program.ranks):
        right: set[object] = set()  # what was found right is so in every round of microbatches
        for place, its in enumerate(instructions):
            op, stage, k, peer, version = its
            in_turn = its if k is None or k not in numbers else (op, stage, k % turn, peer, version is None)
            if in_turn in right:
                continue
            error = _incomplete(its) or _elsewhere(program, rank, its) or _misdirected(program, rank, its)
            if error is None:
                right.add(in_turn)
            else:
                yield ProgramError(rank, place, error)


def _incomplete(its: Instruction) -> str | None:
    if its.op in _OF_MICROBATCHES and its.microbatch is None:
        return "has no microbatch"
    if (its.op in _TRANSFERS) != (its.peer is not None):
        return "has no other rank" if its.peer is None else f"has nothing to do with rank {its.peer}"
    return "has no version" if its.op in (Op.STASH, Op.POP) and its.version is None else None


def _elsewhere(program: Program, rank: int, its: Instruction) -> str | None:
    if not 0 <= its.stage < program.stages:
        return f"there is no stage {its.stage} of {program.stages}"
    if rank not in program.placement[its.stage]:
        holders = ", ".join(map(str, program.placement[its.stage]))
        return f"stage {its.stage} is not on this rank, but on {holders}"
    if its.microbatch is None:
        return None
    if not 0 <= its.microbatch < program.microbatches:
        return f"there is no microbatch {its.microbatch} of {program.microbatches}"
    holder = program.holder(its.stage, its.microbatch)
    if holder == rank:
        return None
    return f"microbatch {its.microbatch} of stage {its.stage} is that of rank {holder}: replicas take turns"


def _misdirected(program: Program, rank: int, its: Instruction) -> str | None:
    """A send goes to the rank that needs it, a receive comes from the rank that makes it."""
    if its.microbatch is None or its.op not in _TRANSFERS:
        return None
    other = counterpart(rank, its).stage
    if not 0 <= other < program.stages:
        return f"stage {its.stage} is the {'first' if other < 0 else 'last'}: it has no such neighbour"
    right = program.holder(other, its.microbatch)
    if its.peer == right and right != rank:
        return None
    if right == rank:
        return f"stage {other} is on this rank too: nothing is sent"
    way = "go to" if its.op in SENDS else "come from"
    return f"microbatch {its.microbatch} of stage {other} is on rank {right}: this must {way} it"


_Stands = set[tuple[Op, int, int | None]]
_Wants = tuple[set[int], list[tuple[Any, ...]]]  # where it is noted; each need, and where what meets it is


class _Done:
    """What a rank has done so far: the microbatches of each operation and stage."""

    def __init__(self) -> None:
        self._of: dict[tuple[Op, int], set[int]] = {}

    def of(self, op: Op, stage: int) -> set[int]:
        return self._of.setdefault((op, stage), set())


_SAME = dict.fromkeys(GRADIENT, Op.BACKWARD)  # whole or its first part: either, not both


def once(program: Program) -> Iterator[ProgramError]:
    """Nothing that is about a microbatch stands twice; a backward is whole or in two parts, not both."""
    for rank, instructions in enumerate(program.ranks):
        done = _Done()
        for place, its in enumerate(instructions):
            op, stage, k, _, _ = its
            if k is None:
                continue
            before = done.of(_SAME.get(op, op), stage)
            if k in before:
                yield ProgramError(
                    rank, place, f"{name(program, rank, its)} has been done before: once is enough"
                )
            before.add(k)


def in_order(program: Program) -> Iterator[ProgramError]:
    """What an instruction needs of its own rank stands before it."""
    turn = program.round
    for rank, instructions in enumerate(program.ranks):
        done = _Done()
        known: dict[tuple[Op, int, int], _Wants] = {}  # of one round of microbatches
        there: _Stands = set()  # only looked for when something is wrong
        for place, its in enumerate(instructions):
            op, stage, k, _, _ = its
            if k is None:
                continue
            kind = (op, stage, k % turn)
            if kind not in known:
                known[kind] = _wants(program, rank, its, done)
            own, wanted = known[kind]
            for need, first, *others in wanted:
                if k not in first and not any(k in other for other in others):
                    there = there or {other[:3] for other in instructions}
                    yield ProgramError(rank, place, _unmet(program, rank, its, need, there))
            own.add(k)


def _wants(program: Program, rank: int, its: Instruction, done: _Done) -> _Wants:
    found = needs(program, rank, its)
    wanted = [(need, *(done.of(op, need.stage) for op in need.ops)) for need in found]
    return done.of(its.op, its.stage), wanted


def _unmet(program: Program, rank: int, its: Instruction, need: Need, there: _Stands) -> str:
    wanted = [(op, need.stage, its.microbatch) for op in need.ops]
    behind = any(one in there for one in wanted)
    called = name(program, rank, Instruction(*wanted[0]))
    return f"needs {called} before it, which {'stands behind it' if behind else 'is missing'}"


def forwards(program: Program) -> Iterator[ProgramError]:
    return _covered(program, (Op.FORWARD,), "forward")


def backwards(program: Program) -> Iterator[ProgramError]:
    yield from _covered(program, GRADIENT, "backward")
    for rank, instructions in enumerate(program.ranks if program.halves else ()):
        weights = {(its.stage, its.microbatch) for its in instructions if its.op is Op.BACKWARD_WEIGHT}
        for place, its in enumerate(instructions):
            if its.op is Op.BACKWARD_INPUT and (its.stage, its.microbatch) not in weights:
                called = name(program, rank, its._replace(op=Op.BACKWARD_WEIGHT))
                yield ProgramError(rank, place, f"{called} is missing: the gradient of these weights")


def _covered(program: Program, ops: Sequence[Op], what: str) -> Iterator[ProgramError]:
    """Every stage does this for every microbatch."""
    done: dict[int, set[int]] = {stage: set() for stage in range(program.stages)}
    for instructions in program.ranks:
        for op, stage, k, _, _ in instructions:
            if op in ops and k is not None:
                done[stage].add(k)
    for stage, microbatches in done.items():
        count = program.microbatches - len(microbatches)
        told = min(count, _MOST_NAMED if microbatches else 1)
        missing = (k for k in range(program.microbatches) if k not in microbatches)
        for number, k in enumerate(islice(missing, told), 1):
            rank = program.holder(stage, k)
            more = f", and {count - told} more" if number == told < count else ""
            place = _place_of_forward(program, rank, stage, k)
            yield ProgramError(rank, place, f"the {what} of microbatch {k} at stage {stage} is missing{more}")


def _place_of_forward(program: Program, rank: int, stage: int, microbatch: int) -> int | None:
    wanted = (Op.FORWARD, stage, microbatch)
    return next((place for place, its in enumerate(program.ranks[rank]) if its[:3] == wanted), None)
