"""What is stored is fetched before its backward."""

import pytest

from echelon.program import add_copies, build
from echelon.program.rules import find_errors
from echelon.program.rules.copies import find_copy_errors
from tests.program.cases import program_of

END = "REDUCE NORM UPDATE PUBLISH"


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        ("F0 S0 B0", "what its forward saved is in host memory: put T0 before it"),
        ("F0 S0 I0 W0", "what its forward saved is in host memory: put T0 before it"),
        ("F0 S0 T0 I0 W0", "what its forward saved is in host memory: put T0 before it"),
        ("F0 S0 T0 I0 T0 T0 W0", "T0 has been done before: keep one"),
        ("F0 S0 T0 I0 T0 W0 T0", "its backward stands before it: nothing is left to copy"),
        ("F0 I0 S0 T0 W0", "its backward stands before it: nothing is left to copy"),
        ("F0 S0 F1 B1", "is never fetched: put its T before the backward"),
        ("F0 T0 B0", "needs S0 before it"),
        ("S0 F0 T0 B0", "needs F0 before it"),
        ("F0 S0 B0 T0", "its backward stands before it: nothing is left to copy"),
        ("F0 S0 S0 T0 B0", "S0 has been done before: keep one"),
        ("F0 S0 T0 T0 B0", "T0 has been done before: keep one"),
    ],
)
def test_errors(work: str, reason: str) -> None:
    errors = find_errors(program_of(f"rank 0: {work} {END}"))
    assert any(reason in error.reason for error in errors), [error.reason for error in errors]


def test_an_error_is_reported_where_it_is_and_once() -> None:
    def found(work: str) -> list[tuple[int | None, str]]:
        errors = find_copy_errors(program_of(f"rank 0: {work} {END}"))
        return [(error.index, error.reason.partition(":")[0]) for error in errors]

    missing, late, never = (
        "what its forward saved is in host memory",
        "its backward stands before it",
        "is never fetched",
    )
    assert found("F0 S0 I0 W0") == [(2, missing), (3, missing)]
    assert found("F0 S0 B0 B0") == [(2, missing)]
    assert found("F0 S0 B0 T0") == [(2, missing), (3, late)]
    assert found("F0 I0 S0 W0") == [(2, late)], "what was not copied need not come back"
    assert found("F0 F1 S0 S1 T1 B1") == [(2, never)]
    assert found("F0 S0 T0 I0 T0 W0") == found("F0 I0 W0 F1 S1 T1 B1") == []


def test_each_part_of_a_backward_has_a_fetch() -> None:
    assert find_errors(program_of(f"rank 0: F0 S0 T0 I0 T0 W0 {END}")) == []
    (error,) = find_errors(program_of(f"rank 0: F0 S0 T0 I0 {END}"))
    assert "W0 is missing" in error.reason


def test_a_microbatch_may_stay() -> None:
    assert find_errors(program_of(f"rank 0: F0 S0 F1 B1 T0 B0 {END}")) == []


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble", "pipedream"])
def test_every_schedule_with_copies_passes(name: str) -> None:
    program = build(name, (1, 1), 4, copies=True)
    assert find_errors(program) == []
    assert program == add_copies(build(name, (1, 1), 4))
