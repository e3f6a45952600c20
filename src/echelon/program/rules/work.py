"""Rules of the work: each instruction belongs to its rank, each computation stands once, after its needs."""

from collections.abc import Iterator, Sequence
from itertools import islice

from echelon.program.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Op, Program
from echelon.program.readiness import GRADIENT, Need, counterpart, needs
from echelon.program.rules.fault import Fault, each, name

_MOST_NAMED = 5  # of things that are missing


def placed(program: Program) -> Iterator[Fault]:
    """Every instruction is whole, and about a stage and a microbatch that are its rank's own."""
    for stage, ranks in enumerate(program.placement):
        if not ranks or not set(ranks) <= set(range(len(program.ranks))):
            yield Fault(
                0, None, f"stage {stage} is on ranks {list(ranks)}, of {len(program.ranks)} that there are"
            )
            return
    for rank, place, its in each(program):
        fault = _incomplete(its) or _elsewhere(program, rank, its) or _misdirected(program, rank, its)
        if fault is not None:
            yield Fault(rank, place, fault)


def _incomplete(its: Instruction) -> str | None:
    if its.op in (*COMPUTE, *SENDS, *RECEIVES) and its.microbatch is None:
        return "has no microbatch"
    if its.op in (*SENDS, *RECEIVES) and its.peer is None:
        return "has no other rank"
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
    if its.microbatch is None or its.op not in (*SENDS, *RECEIVES):
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


def once(program: Program) -> Iterator[Fault]:
    """Nothing that is about a microbatch stands twice; a backward is whole or in two parts, not both."""
    for rank, instructions in enumerate(program.ranks):
        seen: set[tuple[Op, int, int | None]] = set()
        for place, its in enumerate(instructions):
            if its.microbatch is None:
                continue
            same = GRADIENT if its.op in GRADIENT else (its.op,)
            if any((op, its.stage, its.microbatch) in seen for op in same):
                yield Fault(rank, place, f"{name(program, rank, its)} has been done before: once is enough")
            seen.add((its.op, its.stage, its.microbatch))


def in_order(program: Program) -> Iterator[Fault]:
    """What an instruction needs of its own rank stands before it."""
    for rank, instructions in enumerate(program.ranks):
        places: dict[tuple[Op, int, int | None], int] = {}
        for place, its in enumerate(instructions):
            places.setdefault((its.op, its.stage, its.microbatch), place)
        for place, its in enumerate(instructions):
            for need in needs(program, rank, its):
                found = [places.get((op, need.stage, its.microbatch)) for op in need.ops]
                first = min((at for at in found if at is not None), default=None)
                if first is None or first > place:
                    yield Fault(rank, place, _unmet(program, rank, its, need, missing=first is None))


def _unmet(program: Program, rank: int, its: Instruction, need: Need, *, missing: bool) -> str:
    called = name(program, rank, Instruction(need.ops[0], need.stage, its.microbatch))
    return f"needs {called} before it, which {'is missing' if missing else 'stands behind it'}"


def forwards(program: Program) -> Iterator[Fault]:
    return _covered(program, (Op.FORWARD,), "forward")


def backwards(program: Program) -> Iterator[Fault]:
    yield from _covered(program, GRADIENT, "backward")
    for rank, instructions in enumerate(program.ranks):
        weights = {(its.stage, its.microbatch) for its in instructions if its.op is Op.BACKWARD_WEIGHT}
        for place, its in enumerate(instructions):
            if its.op is Op.BACKWARD_INPUT and (its.stage, its.microbatch) not in weights:
                called = name(program, rank, its._replace(op=Op.BACKWARD_WEIGHT))
                yield Fault(rank, place, f"{called} is missing: the gradient of these weights")


def _covered(program: Program, ops: Sequence[Op], what: str) -> Iterator[Fault]:
    """Every stage does this for every microbatch."""
    done: dict[int, set[int]] = {stage: set() for stage in range(program.stages)}
    for _, _, its in each(program):
        if its.op in ops and its.microbatch is not None:
            done[its.stage].add(its.microbatch)
    for stage, microbatches in done.items():
        count = program.microbatches - len(microbatches)
        told = min(count, _MOST_NAMED if microbatches else 1)
        missing = (k for k in range(program.microbatches) if k not in microbatches)
        for number, k in enumerate(islice(missing, told), 1):
            rank = program.holder(stage, k)
            more = f", and {count - told} more" if number == told < count else ""
            place = _place_of_forward(program, rank, stage, k)
            yield Fault(rank, place, f"the {what} of microbatch {k} at stage {stage} is missing{more}")


def _place_of_forward(program: Program, rank: int, stage: int, microbatch: int) -> int | None:
    wanted = (Op.FORWARD, stage, microbatch)
    return next((place for place, its in enumerate(program.ranks[rank]) if its[:3] == wanted), None)
