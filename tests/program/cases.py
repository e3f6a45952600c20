"""Programs for the tests of the package: every schedule, with numbers that hypothesis chooses."""

from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st

from echelon.plan import ASYNCHRONOUS_SCHEDULES, SCHEDULES
from echelon.program import Instruction, Op, Program, add_transfers, asynchronous, build
from echelon.program.instruction import COMPUTE, COPIES, RECEIVES, SENDS
from echelon.program.text import parse


class Shape(NamedTuple):
    """The numbers of a schedule."""

    name: str
    replicas: tuple[int, ...]
    microbatches: int
    chunks: int = 1
    batches: int = 1

    @property
    def taken(self) -> int:
        return self.microbatches * self.batches

    def program(self) -> Program:
        if self.name in ASYNCHRONOUS_SCHEDULES:
            stages = len(self.replicas)
            return add_transfers(asynchronous(self.name, stages, self.microbatches, taken=self.taken))
        return build(self.name, self.replicas, self.microbatches, self.chunks)


@st.composite
def shapes(draw: st.DrawFn, names: tuple[str, ...] = SCHEDULES, most_replicas: int = 3) -> Shape:
    name = draw(st.sampled_from(names))
    depth = draw(st.integers(1, 6))
    if name == "interleaved":
        return Shape(name, (1,) * depth, depth * draw(st.integers(1, 3)), draw(st.integers(2, 3)))
    if name in ASYNCHRONOUS_SCHEDULES:
        least = depth if name == "pipedream-2bw" else 1
        return Shape(name, (1,) * depth, draw(st.integers(least, 9)), batches=draw(st.integers(1, 4)))
    replicas = draw(st.lists(st.integers(1, most_replicas), min_size=depth, max_size=depth))
    return Shape(name, tuple(replicas), draw(st.integers(1, 9)))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any instructions that can be written, whether or not they make sense together."""
    ranks, stages = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    some_ranks = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True)
    placement = tuple(tuple(draw(some_ranks)) for _ in range(stages))
    numbers = st.integers(0, 30)

    def instruction() -> Instruction:
        op, stage = draw(st.sampled_from(Op)), draw(st.integers(0, stages - 1))
        if op in COMPUTE:
            return Instruction(op, stage, draw(numbers), version=draw(st.none() | numbers))
        if op in COPIES:
            return Instruction(op, stage, draw(numbers))
        if op in (*SENDS, *RECEIVES):
            return Instruction(op, stage, draw(numbers), draw(st.integers(0, ranks - 1)))
        return Instruction(op, stage, version=draw(numbers) if op in (Op.STASH, Op.POP) else None)

    lists = tuple(tuple(instruction() for _ in range(draw(st.integers(0, 5)))) for _ in range(ranks))
    return Program(draw(st.sampled_from(["a", "x-y 2", "1f1b"])), placement, draw(numbers), lists)


def program_of(text: str) -> Program:
    """The program of a text."""
    parsed = parse(text)
    assert parsed.program is not None, parsed.errors
    return parsed.program


def with_rank(program: Program, rank: int, instructions: list[Instruction]) -> Program:
    """The same program with other instructions on one rank."""
    ranks = [*program.ranks]
    ranks[rank] = tuple(instructions)
    return replace(program, ranks=tuple(ranks))
