"""PipeDream: which version each microbatch meets, and steps that put together are the whole."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.program import ASYNCHRONOUS, Instruction, Op, Program, add_transfers, asynchronous, check
from echelon.program.asynchronous import Move
from tests.program.cases import Shape, shapes

module = sys.modules["echelon.program.asynchronous"]  # the package's own name for it is the function


def met(program: Program, op: Op) -> dict[int, list[int | None]]:
    """By microbatch the version that each stage used."""
    used: dict[int, list[int | None]] = {}
    for rank in program.ranks:
        for its in rank:
            if its.op is op and its.microbatch is not None:
                used.setdefault(its.microbatch, []).append(its.version)
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
def test_each_microbatch_meets_the_versions_of_the_formula(name: str, versions, op: Op) -> None:  # type: ignore[no-untyped-def]
    program = asynchronous(name, 3, 3, taken=12)
    assert met(program, op) == {k: versions(k) for k in range(12)}


def slices(name: str, stages: int, microbatches: int, ends: list[int]) -> list[Program]:
    """Consecutive steps; the last one drains. It may take in nothing more."""
    bounds = list(pairwise([0, *ends]))
    return [
        asynchronous(name, stages, microbatches, begin=begin, taken=end - begin, drain=place == len(ends))
        for place, (begin, end) in enumerate(bounds, 1)
    ]


def joined(programs: list[Program], whole: Program) -> Program:
    ranks = tuple(
        tuple(its for program in programs for its in program.ranks[rank]) for rank in range(len(whole.ranks))
    )
    return replace(whole, ranks=ranks)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, int, int, list[int]]:
    name = draw(st.sampled_from(ASYNCHRONOUS))
    stages = draw(st.integers(1, 5))
    microbatches = draw(st.integers(stages if name == "pipedream-2bw" else 1, 6))
    steps = draw(st.integers(1, 12))  # late ones are made from early ones
    ends = [microbatches * (step + 1) for step in range(steps)]
    return name, stages, microbatches, ends + ends[-1:] * draw(st.booleans())


def computation(program: Program) -> list[list[Instruction]]:
    """What each rank does, but for what it keeps: a step cannot know whether the next one drains."""
    return [[its for its in rank if its.op not in (Op.STASH, Op.POP)] for rank in program.ranks]


@settings(deadline=None)
@given(cuts())
def test_steps_put_together_are_the_whole(cut: tuple[str, int, int, list[int]]) -> None:
    name, stages, microbatches, ends = cut
    whole = asynchronous(name, stages, microbatches, taken=ends[-1])
    together = joined(slices(name, stages, microbatches, ends), whole)
    assert computation(together) == computation(whole)


@settings(deadline=None)
@given(cuts())
def test_steps_can_be_lowered_one_by_one(cut: tuple[str, int, int, list[int]]) -> None:
    """A gradient that is sent in one step and used in the next is received there, and only once; a version
    that was kept for a step that never came is let go."""
    name, stages, microbatches, ends = cut
    whole = add_transfers(asynchronous(name, stages, microbatches, taken=ends[-1]))
    lowered = joined([add_transfers(step) for step in slices(name, stages, microbatches, ends)], whole)
    check(lowered)
    assert computation(lowered) == computation(whole)


@settings(deadline=None)
@given(cuts(), st.booleans())
def test_a_late_step_is_cut_out_of_the_whole(cut: tuple[str, int, int, list[int]], drain: bool) -> None:
    """Steps after many others are made from early ones: they must be what stands in the long program."""
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

    def counted(*arguments: Any, **options: Any) -> Iterator[Move]:
        nonlocal made
        for move in moves(*arguments, **options):
            made += 1
            yield move

    moves = module._moves
    monkeypatch.setattr(module, "_moves", counted)
    costs = []
    for begin in (1000, 1_000_000):
        made = 0
        asynchronous("pipedream-2bw", 4, 8, begin=begin, drain=False)
        costs.append(made)
    assert costs[0] == costs[1]


def test_draining_lets_go_what_was_stashed_for_later() -> None:
    *_, last = slices("pipedream-vertical", 3, 1, [1, 2, 3])
    assert last.ranks[2][0] == Instruction(Op.POP, 2, version=1)


@settings(deadline=None)
@given(shapes(names=ASYNCHRONOUS))
def test_a_version_is_stashed_only_where_it_is_used_again(shape: Shape) -> None:
    for rank in shape.program().ranks:
        for place, its in enumerate(rank):
            if its.op is Op.STASH:
                later = [use for use in rank[place:] if use.op is Op.BACKWARD and use.version == its.version]
                assert later


def test_a_step_leaves_on_its_way_what_the_next_one_finishes() -> None:
    first = asynchronous("pipedream", 3, 4, taken=4, drain=False)
    forwards = [[its.microbatch for its in rank if its.op is Op.FORWARD] for rank in first.ranks]
    backwards = [[its.microbatch for its in rank if its.op is Op.BACKWARD] for rank in first.ranks]
    assert forwards == [[0, 1, 2, 3]] * 3
    assert backwards == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
