"""Flushed schedules: literal staircases."""

import pytest

from echelon.program import Program, check, flushed, forward_only
from echelon.program.lower import add_transfers
from echelon.program.text import show_instruction


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
