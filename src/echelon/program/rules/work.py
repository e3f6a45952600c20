"""Rules of the work: instructions belong to their rank, and computations stand once, after their needs."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from echelon.program.instruction import COMPUTE, COPIES, RECEIVES, SENDS, Instruction, Op, Program
from echelon.program.readiness import GRADIENT, Need, counterpart, needs
from echelon.program.rules.error import ProgramError, word

_MOST_NAMED = 5  # missing computations of one stage
_TRANSFERS = SENDS | RECEIVES
_HAS_MICROBATCH = COMPUTE | COPIES | _TRANSFERS


def find_misplaced(program: Program) -> Iterator[ProgramError]:
    """Every instruction is complete, and about a stage and a microbatch of its rank."""
    last = len(program.ranks) - 1
    for stage, ranks in enumerate(program.placement):
        if not ranks or not set(ranks) <= set(range(last + 1)):
            yield ProgramError(
                0, None, f"stage {stage} is on ranks {list(ranks)}, but the ranks are 0 … {last}"
            )
            return
    numbers, period = range(program.microbatches), program.round
    for rank, instructions in enumerate(program.ranks):
        valid: set[object] = set()  # what is valid in one round of microbatches is so in every round
        for index, instruction in enumerate(instructions):
            op, stage, k, peer, version = instruction
            kind = (
                instruction
                if k is None or k not in numbers
                else (op, stage, k % period, peer, version is None)
            )
            if kind in valid:
                continue
            reason = (
                _incomplete(instruction)
                or _elsewhere(program, rank, instruction)
                or _misdirected(program, rank, instruction)
            )
            if reason is None:
                valid.add(kind)
            else:
                yield ProgramError(rank, index, reason)


def _incomplete(instruction: Instruction) -> str | None:
    op, _, microbatch, peer, version = instruction
    if op in _HAS_MICROBATCH and microbatch is None:
        return "has no microbatch"
    if (op in _TRANSFERS) != (peer is not None):
        return "has no other rank" if peer is None else f"is no transfer, but names rank {peer}"
    return "has no version" if op in (Op.STASH, Op.POP) and version is None else None


def _elsewhere(program: Program, rank: int, instruction: Instruction) -> str | None:
    _, stage, microbatch, _, _ = instruction
    if not 0 <= stage < program.stages:
        return f"there is no stage {stage} of {program.stages}"
    if rank not in program.placement[stage]:
        holders = ", ".join(map(str, program.placement[stage]))
        return f"stage {stage} is not on this rank, but on {holders}"
    if microbatch is None:
        return None
    if not 0 <= microbatch < program.microbatches:
        return f"there is no microbatch {microbatch} of {program.microbatches}"
    holder = program.holder(stage, microbatch)
    if holder == rank:
        return None
    return f"microbatch {microbatch} of stage {stage} belongs to rank {holder}: replicas take turns"


def _misdirected(program: Program, rank: int, instruction: Instruction) -> str | None:
    """A send goes to the rank that needs it, a receive comes from the rank that makes it."""
    op, stage, microbatch, peer, _ = instruction
    if microbatch is None or op not in _TRANSFERS:
        return None
    other = counterpart(rank, instruction).stage
    if not 0 <= other < program.stages:
        return f"stage {stage} is the {'first' if other < 0 else 'last'}: it has no such neighbour"
    holder = program.holder(other, microbatch)
    if holder == rank:
        return f"stage {other} is on this rank too: nothing is sent"
    if holder == peer:
        return None
    direction = "go to" if op in SENDS else "come from"
    return f"microbatch {microbatch} of stage {other} is on rank {holder}: this must {direction} it"


_Listed = set[tuple[Op, int, int | None]]
_Wants = tuple[set[int], list[tuple[Any, ...]]]  # where it is noted; each need, and where what meets it is


class _Done:
    """What a rank has done so far: the microbatches of each operation and stage."""

    def __init__(self) -> None:
        self._microbatches: dict[tuple[Op, int], set[int]] = {}

    def of(self, op: Op, stage: int) -> set[int]:
        return self._microbatches.setdefault((op, stage), set())


_SAME = dict.fromkeys(GRADIENT, Op.BACKWARD)  # a whole backward or its first part: either, not both


def find_duplicates(program: Program) -> Iterator[ProgramError]:
    """Nothing that is about a microbatch stands twice; a backward is whole or in two parts, not both. Each of
    the parts may have a T of its own."""
    for rank, instructions in enumerate(program.ranks):
        done = _Done()
        for index, instruction in enumerate(instructions):
            op, stage, k, _, _ = instruction
            if k is None:
                continue
            microbatches = done.of(_SAME.get(op, op), stage)
            if k in microbatches:
                again = word(program, rank, instruction)
                yield ProgramError(rank, index, f"{again} has been done before: keep one")
            microbatches.add(k)
            if op is Op.BACKWARD_INPUT:
                done.of(Op.FETCH, stage).discard(k)


def find_unmet_needs(program: Program) -> Iterator[ProgramError]:
    """What an instruction needs of its own rank stands before it."""
    period = program.round
    for rank, instructions in enumerate(program.ranks):
        done = _Done()
        known: dict[tuple[Op, int, int], _Wants] = {}  # of one round of microbatches
        listed: _Listed = set()  # filled when something is wrong
        for index, instruction in enumerate(instructions):
            op, stage, k, _, _ = instruction
            if k is None:
                continue
            kind = (op, stage, k % period)
            if kind not in known:
                known[kind] = _wants(program, rank, instruction, done)
            own, wanted = known[kind]
            for need, first, *others in wanted:
                if k not in first and not any(k in other for other in others):
                    listed = listed or {other[:3] for other in instructions}
                    yield ProgramError(rank, index, _unmet(program, rank, instruction, need, listed))
            own.add(k)


def _wants(program: Program, rank: int, instruction: Instruction, done: _Done) -> _Wants:
    wanted = [
        (need, *(done.of(op, need.stage) for op in need.ops)) for need in needs(program, rank, instruction)
    ]
    return done.of(instruction.op, instruction.stage), wanted


def _unmet(program: Program, rank: int, instruction: Instruction, need: Need, listed: _Listed) -> str:
    wanted = [(op, need.stage, instruction.microbatch) for op in need.ops]
    is_behind = any(one in listed for one in wanted)
    missing = word(program, rank, Instruction(*wanted[0]))
    return f"needs {missing} before it, which {'stands behind it' if is_behind else 'is missing'}"


def find_missing_forwards(program: Program) -> Iterator[ProgramError]:
    """Every stage has a forward of every microbatch."""
    return _missing(program, (Op.FORWARD,), "forward")


def find_missing_backwards(program: Program) -> Iterator[ProgramError]:
    """Every stage has a backward of every microbatch: whole, or both parts."""
    yield from _missing(program, GRADIENT, "backward")
    for rank, instructions in enumerate(program.ranks if program.halves else ()):
        weights = {(stage, k) for op, stage, k, _, _ in instructions if op is Op.BACKWARD_WEIGHT}
        for index, instruction in enumerate(instructions):
            op, stage, k, _, _ = instruction
            if op is Op.BACKWARD_INPUT and (stage, k) not in weights:
                second = word(program, rank, instruction._replace(op=Op.BACKWARD_WEIGHT))
                yield ProgramError(rank, index, f"{second} is missing: the gradient of these weights")


def _missing(program: Program, ops: Sequence[Op], kind: str) -> Iterator[ProgramError]:
    """The microbatches without any of `ops`, at each stage."""
    done: dict[int, set[int]] = {stage: set() for stage in range(program.stages)}
    for instructions in program.ranks:
        for op, stage, k, _, _ in instructions:
            if op in ops and k is not None:
                done[stage].add(k)
    for stage, microbatches in done.items():
        count = program.microbatches - len(microbatches)
        num_named = min(count, _MOST_NAMED if microbatches else 1)
        missing = (k for k in range(program.microbatches) if k not in microbatches)
        for number, k in enumerate(islice(missing, num_named), 1):
            rank = program.holder(stage, k)
            more = f", and {count - num_named} more" if number == num_named < count else ""
            reason = f"the {kind} of microbatch {k} at stage {stage} is missing{more}"
            yield ProgramError(rank, _index_of_forward(program, rank, stage, k), reason)


def _index_of_forward(program: Program, rank: int, stage: int, microbatch: int) -> int | None:
    forward = (Op.FORWARD, stage, microbatch)
    listed = (index for index, instruction in enumerate(program.ranks[rank]) if instruction[:3] == forward)
    return next(listed, None)
