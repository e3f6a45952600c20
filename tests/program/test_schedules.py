"""Flushed schedules: literal staircases."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.plan import ASYNCHRONOUS_SCHEDULES
from echelon.program import (
    Instruction,
    Op,
    Program,
    add_transfers,
    asynchronous,
    check,
    flushed,
    forward_only,
    schedules,
)
from echelon.program.schedules import Step
from echelon.program.text import show_instruction
from tests.program.cases import Shape, shapes


def staircase(program: Program) -> list[str]:
    return [
        " ".join(show_instruction(instruction, program.stages_of(rank)) for instruction in work)
        for rank, work in enumerate(program.ranks)
    ]


@pytest.mark.parametrize(
    ("name", "replicas", "microbatches", "chunks", "expected"),
    [
        ("naive", (1, 1), 2, 1, ["F0 B0 F1 B1", "F0 B0 F1 B1"]),
        ("gpipe", (1, 1), 3, 1, ["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"]),
        ("1f1b", (1,) * 3, 3, 1, ["F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]),
        ("1f1b", (1,) * 3, 1, 1, ["F0 B0"] * 3),
        ("1f1b", (2, 1), 4, 1, ["F0 F2 B0 B2", "F1 F3 B1 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        ("zero-bubble", (1, 1), 3, 1, ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]),
        (
            "interleaved", (1, 1), 2, 2,
            ["F0@0 F1@0 F0@2 F1@2 B0@2 B1@2 B0@0 B1@0", "F0@1 F1@1 F0@3 F1@3 B0@3 B1@3 B0@1 B1@1"],
        ),
    ],
)  # fmt: skip
def test_small_ones(
    name: str, replicas: tuple[int, ...], microbatches: int, chunks: int, expected: list[str]
) -> None:
    assert staircase(flushed(name, replicas, microbatches, chunks)) == expected


def test_forward_only_goes_through_every_stage() -> None:
    program = add_transfers(forward_only(((0, 1), (2,)), 3))
    assert staircase(program) == ["F0 SA0>2 F2 SA2>2", "F1 SA1>2", "RA0<0 F0 RA1<1 F1 RA2<0 F2"]
    check(program, training=False)


def test_forward_only_over_chunks() -> None:
    program = add_transfers(forward_only(((0,), (1,), (0,), (1,)), 2))
    check(program, training=False)


def versions_used(program: Program, op: Op) -> dict[int, list[int | None]]:
    """By microbatch the version that each stage used."""
    used: dict[int, list[int | None]] = {}
    for rank in program.ranks:
        for instruction in rank:
            if instruction.op is op and instruction.microbatch is not None:
                used.setdefault(instruction.microbatch, []).append(instruction.version)
    return used


@pytest.mark.parametrize("op", [Op.FORWARD, Op.BACKWARD])
@pytest.mark.parametrize(
    ("name", "versions"),
    [
        # W(t+1) = W(t) − ν·∇f(W₀(t−2), W₁(t−1), W₂(t)) with three stages, from microbatch 2 on
        ("pipedream", lambda k: [max(0, k - 2), max(0, k - 1), k]),
        ("pipedream-vertical", lambda k: [max(0, k - 2)] * 3),
        ("pipedream-2bw", lambda k: [max(0, k // 3 - 1)] * 3),
    ],
)
def test_each_microbatch_uses_the_versions_of_the_formula(name: str, versions, op: Op) -> None:  # type: ignore[no-untyped-def]
    program = asynchronous(name, 3, 3, taken=12)
    assert versions_used(program, op) == {k: versions(k) for k in range(12)}


def slices(name: str, stages: int, microbatches: int, ends: list[int]) -> list[Program]:
    """Consecutive steps; the last one drains. It may take in nothing more."""
    bounds = list(pairwise([0, *ends]))
    return [
        asynchronous(name, stages, microbatches, begin=begin, taken=end - begin, drain=place == len(ends))
        for place, (begin, end) in enumerate(bounds, 1)
    ]


def joined(programs: list[Program], whole: Program) -> Program:
    ranks = zip(*(program.ranks for program in programs), strict=True)
    return replace(whole, ranks=tuple(tuple(chain.from_iterable(parts)) for parts in ranks))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, int, int, list[int]]:
    name = draw(st.sampled_from(ASYNCHRONOUS_SCHEDULES))
    stages = draw(st.integers(1, 5))
    microbatches = draw(st.integers(stages if name == "pipedream-2bw" else 1, 6))
    steps = draw(st.integers(1, 12))  # late ones are made from early ones
    ends = [microbatches * (step + 1) for step in range(steps)]
    return name, stages, microbatches, ends + ends[-1:] * draw(st.booleans())


def computation(program: Program) -> list[list[Instruction]]:
    """The program without STASH and POP: a step does not know whether the next one drains."""
    stashing = (Op.STASH, Op.POP)
    return [[instruction for instruction in rank if instruction.op not in stashing] for rank in program.ranks]


@pytest.mark.slow
@settings(deadline=None)
@given(cuts())
def test_steps_put_together_are_the_whole(cut: tuple[str, int, int, list[int]]) -> None:
    name, stages, microbatches, ends = cut
    whole = asynchronous(name, stages, microbatches, taken=ends[-1])
    together = joined(slices(name, stages, microbatches, ends), whole)
    assert computation(together) == computation(whole)


@pytest.mark.slow
@settings(deadline=None)
@given(cuts())
def test_steps_can_be_lowered_one_by_one(cut: tuple[str, int, int, list[int]]) -> None:
    """A gradient that is sent in one step and used in the next is received there, and only once. A version
    that was stashed for a step that never comes is popped."""
    name, stages, microbatches, ends = cut
    whole = add_transfers(asynchronous(name, stages, microbatches, taken=ends[-1]))
    lowered = joined([add_transfers(step) for step in slices(name, stages, microbatches, ends)], whole)
    check(lowered)
    assert computation(lowered) == computation(whole)


@settings(deadline=None)
@given(cuts(), st.booleans())
def test_a_late_step_is_cut_out_of_the_whole(cut: tuple[str, int, int, list[int]], drain: bool) -> None:
    """Late steps are made from early ones: they must equal that part of the long program."""
    name, stages, microbatches, _ = cut
    begin = 20 * microbatches
    late = asynchronous(name, stages, microbatches, begin=begin, drain=drain)
    whole = computation(asynchronous(name, stages, microbatches, taken=begin + microbatches))
    for rank, work in enumerate(computation(late)):
        first = whole[rank].index(work[0])
        assert whole[rank][first : first + len(work)] == work
        assert not drain or first + len(work) == len(whole[rank])


def test_a_late_step_costs_no_more_than_an_early_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def counted(*arguments: Any, **options: Any) -> Iterator[Step]:
        nonlocal made
        for move in moves(*arguments, **options):
            made += 1
            yield move

    moves = schedules._moves
    monkeypatch.setattr(schedules, "_moves", counted)
    costs = []
    for begin in (1000, 1_000_000):
        made = 0
        asynchronous("pipedream-2bw", 4, 8, begin=begin, drain=False)
        costs.append(made)
    assert costs[0] == costs[1]


def test_draining_pops_what_was_stashed_for_later() -> None:
    *_, last = slices("pipedream-vertical", 3, 1, [1, 2, 3])
    assert last.ranks[2][0] == Instruction(Op.POP, 2, version=1)


@settings(deadline=None)
@given(shapes(names=ASYNCHRONOUS_SCHEDULES))
def test_a_version_is_stashed_only_where_it_is_used_again(shape: Shape) -> None:
    for rank in shape.program().ranks:
        for index, (op, _, _, _, version) in enumerate(rank):
            if op is Op.STASH:
                assert [use for use in rank[index:] if use.op is Op.BACKWARD and use.version == version]


def test_a_step_leaves_in_flight_what_the_next_one_finishes() -> None:
    first = asynchronous("pipedream", 3, 4, taken=4, drain=False)
    forwards = [[k for op, _, k, _, _ in rank if op is Op.FORWARD] for rank in first.ranks]
    backwards = [[k for op, _, k, _, _ in rank if op is Op.BACKWARD] for rank in first.ranks]
    assert forwards == [[0, 1, 2, 3]] * 3
    assert backwards == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
