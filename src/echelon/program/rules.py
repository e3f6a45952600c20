"""Rules of a program: work stands once, on its rank, after its needs; messages match; no rank waits forever.

A copy to host memory stands between a forward and its backward: `F0 S0 … T0 B0`, `F0 S0 … T0 I0 … T0 W0`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from echelon.program.instruction import COMPUTE, COPIES, RECEIVES, SENDS, Instruction, Op, Program
from echelon.program.readiness import BACKWARDS, GRADIENT, Channel, counterpart, needs, partners, walk
from echelon.program.text import show_instruction


@dataclass(frozen=True)
class ProgramError:
    """An error on a rank, at an index of its list (None: an instruction is missing), and the reason."""

    rank: int
    index: int | None
    reason: str

    def sentence(self, program: Program, lines: Mapping[int, int]) -> str:
        """The error as the user reads it. `lines` has the line of each rank, if they are from a file."""
        line = f"line {lines[self.rank]}, " if self.rank in lines else ""
        where = f"{line}rank {self.rank}"
        if self.index is not None:
            where += f", {word(program, self.rank, program.ranks[self.rank][self.index])}"
        return f"{where}: {self.reason}"


def word(program: Program, rank: int, instruction: Instruction) -> str:
    """An instruction as it is written on the line of `rank`."""
    return show_instruction(instruction, program.stages_of(rank))


_MOST_NAMED = 5  # ranks, or missing computations of one stage, in one error
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
            reason = _misplaced(program, rank, instruction) or _misdirected(program, rank, instruction)
            if reason is None:
                valid.add(kind)
            else:
                yield ProgramError(rank, index, reason)


def _misplaced(program: Program, rank: int, instruction: Instruction) -> str | None:
    op, stage, microbatch, peer, version = instruction
    if op in _HAS_MICROBATCH and microbatch is None:
        return "has no microbatch"
    if (op in _TRANSFERS) != (peer is not None):
        return "has no other rank" if peer is None else f"is no transfer, but names rank {peer}"
    if op in (Op.STASH, Op.POP) and version is None:
        return "has no version"
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
_Done = dict[tuple[Op, int], set[int]]  # by operation and stage, the microbatches that a rank has done
_SAME = dict.fromkeys(GRADIENT, Op.BACKWARD)  # a whole backward or its first part: either, not both


def find_duplicates(program: Program) -> Iterator[ProgramError]:
    """Nothing about a microbatch stands twice; a backward is whole, or in parts that may have a T each."""
    for rank, instructions in enumerate(program.ranks):
        done: _Done = defaultdict(set)
        for index, instruction in enumerate(instructions):
            op, stage, k, _, _ = instruction
            if k is None:
                continue
            microbatches = done[_SAME.get(op, op), stage]
            if k in microbatches:
                again = word(program, rank, instruction)
                yield ProgramError(rank, index, f"{again} has been done before: keep one")
            microbatches.add(k)
            if op is Op.BACKWARD_INPUT:
                done[Op.FETCH, stage].discard(k)


def find_unmet_needs(program: Program) -> Iterator[ProgramError]:
    """Find instructions whose needs do not stand before them on their own rank."""
    period = program.round
    for rank, instructions in enumerate(program.ranks):
        done: _Done = defaultdict(set)
        known: dict[tuple[Op, int, int], _Wants] = {}  # of one round of microbatches
        listed: _Listed = set()  # filled when something is wrong
        for index, instruction in enumerate(instructions):
            op, stage, k, _, _ = instruction
            if k is None:
                continue
            kind = (op, stage, k % period)
            if kind not in known:
                needed = needs(program, rank, instruction)
                known[kind] = (
                    done[op, stage],
                    [(need, *(done[each, need.stage] for each in need.ops)) for need in needed],
                )
            own, wanted = known[kind]
            for need, first, *others in wanted:
                if k not in first and not any(k in other for other in others):
                    listed = listed or {other[:3] for other in instructions}
                    is_behind = any((each, need.stage, k) in listed for each in need.ops)
                    missing = word(program, rank, Instruction(need.ops[0], need.stage, k))
                    where = "stands behind it" if is_behind else "is missing"
                    yield ProgramError(rank, index, f"needs {missing} before it, which {where}")
            own.add(k)


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
            work = enumerate(program.ranks[rank])
            forwards = (index for index, each in work if each[:3] == (Op.FORWARD, stage, k))
            yield ProgramError(rank, next(forwards, None), reason)


_Slot = tuple[int, int | None]  # stage, microbatch


def find_copy_errors(program: Program) -> Iterator[ProgramError]:
    """Find activations that are stored and not fetched before each part of their backward."""
    for rank in range(len(program.ranks)):
        yield from _copies_of(program, rank)


def _copies_of(program: Program, rank: int) -> Iterator[ProgramError]:
    instructions = program.ranks[rank]
    if not any(instruction.op in COPIES for instruction in instructions):
        return
    stored: dict[_Slot, int] = {}  # where its S stands
    away: set[_Slot] = set()
    begun: set[_Slot] = set()  # of which the backward has begun
    gone: set[_Slot] = set()  # of which it is over
    for index, instruction in enumerate(instructions):
        op, stage, microbatch, _, _ = instruction
        slot = stage, microbatch
        if op is Op.STORE:
            stored[slot] = index
            away.add(slot)
        if op in COPIES and slot in (begun if op is Op.STORE else gone):
            away.discard(slot)
            yield ProgramError(rank, index, "its backward stands before it: nothing is left to copy")
        elif op is Op.FETCH:
            away.discard(slot)
        elif op in BACKWARDS:
            if slot in away:
                fetch = word(program, rank, instruction._replace(op=Op.FETCH, version=None))
                reason = f"what its forward saved is in host memory: put {fetch} before it"
                yield ProgramError(rank, index, reason)
                away.discard(slot)
            begun.add(slot)
            if op is not Op.BACKWARD_INPUT:
                gone.add(slot)
            elif slot in stored:
                away.add(slot)
    for slot, index in stored.items():
        if slot in away and slot not in begun:
            yield ProgramError(rank, index, "is never fetched: put its T before the backward")


Receives = list[tuple[int, Instruction]]  # of a channel, each with the index of the receive or of its send


def find_unmatched_transfers(program: Program) -> Iterator[ProgramError]:
    """On each channel from rank to rank the receives match the sends, in their order."""
    sends: dict[Channel, list[int]] = {}
    receives: dict[Channel, list[int]] = {}
    for rank, instructions in enumerate(program.ranks):
        for index, (op, _, _, peer, _) in enumerate(instructions):
            if peer is not None:  # only transfers have one, or `find_misplaced` would have reported it
                indexes, channel = (sends, (rank, peer)) if op in SENDS else (receives, (peer, rank))
                indexes.setdefault(channel, []).append(index)
    for channel in sorted(sends.keys() | receives.keys()):
        sender, receiver = channel
        sent = [
            (index, counterpart(sender, program.ranks[sender][index])) for index in sends.get(channel, [])
        ]
        received = [(index, program.ranks[receiver][index]) for index in receives.get(channel, [])]
        if [receive for _, receive in sent] != [receive for _, receive in received]:
            yield from _unmatched_on(program, channel, sent, received)


def _unmatched_on(
    program: Program, channel: Channel, sent: Receives, received: Receives
) -> Iterator[ProgramError]:
    sender, receiver = channel
    surplus = Counter(receive for _, receive in sent)
    surplus.subtract(receive for _, receive in received)
    if not any(surplus.values()):  # the order is wrong: later receives follow from the first that differs
        pairs = enumerate(zip(sent, received, strict=True), 1)
        number, expected, index = next((n, a, i) for n, ((_, a), (i, b)) in pairs if a != b)
        send = word(program, sender, counterpart(receiver, expected))
        reason = f"receives the wrong message: message {number} from rank {sender} is that of {send}"
        yield ProgramError(receiver, index, f"{reason}; receive in the order of the sends")
    for index, receive in sent:
        if surplus[receive] > 0:
            surplus[receive] -= 1
            missing = word(program, receiver, receive)
            yield ProgramError(sender, index, f"rank {receiver} never receives it: it has no {missing}")
    for index, receive in received:
        if surplus[receive] < 0:
            surplus[receive] += 1
            missing = word(program, sender, counterpart(receiver, receive))
            yield ProgramError(receiver, index, f"rank {sender} never sends it: it has no {missing}")


def find_deadlocks(program: Program) -> Iterator[ProgramError]:
    """All ranks come to the end, whatever the instructions cost."""
    reached = Counter(rank for rank, _, _ in walk(program))
    stuck = {rank: reached[rank] for rank, work in enumerate(program.ranks) if reached[rank] < len(work)}
    for rank, index in stuck.items():
        instruction = program.ranks[rank][index]
        if instruction.peer is not None:
            others = [instruction.peer]
            awaited = word(program, instruction.peer, counterpart(rank, instruction))
        else:
            others = sorted(partners(program, instruction.op, instruction.stage) - {rank})
            of = f"stage {instruction.stage}" if instruction.op is Op.REDUCE else "every rank"
            awaited = f"{instruction.op.value} of {of}"
        places = [
            f"rank {other} waits at {word(program, other, program.ranks[other][stuck[other]])}"
            if other in stuck
            else f"rank {other} has ended"
            for other in others[:_MOST_NAMED]
        ]
        places += [f"and {len(others) - _MOST_NAMED} more"] if len(others) > _MOST_NAMED else []
        yield ProgramError(rank, index, f"deadlock: waits for {awaited}; {', '.join(places)}")
