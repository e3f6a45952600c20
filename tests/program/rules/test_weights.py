"""Rules of the weights: versions that are not there, and gathers without a partner."""

import pytest

from echelon.program.rules.weights import find_gather_errors, find_version_errors
from tests.program.rules.reasons import END, reasons


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"F0v1 B0v1 {END}", "rank 0 at 0: version 1 does not exist yet: the newest is version 0"),
        (f"F0v0 B0v0 {END} F1v0 B1v0 {END}", "rank 0 at 6: version 0 is gone: it was not stashed"),
        (f"F0 F1 B0 {END} B1 {END}", "rank 0 at 7: uses version 1, but its forward used version 0"),
        (
            f"F0 F1v0 B0 REDUCE NORM STASH0 UPDATE PUBLISH POP0 B1v0 {END}",
            "rank 0 at 9: version 0 is gone: it was not stashed, or has been popped",
        ),
        (
            "F0 B0 REDUCE NORM STASH0 UPDATE PUBLISH",
            "rank 0: version 0 of stage 0 is stashed and never popped",
        ),
        (f"STASH1 F0 B0 {END} POP1", "rank 0 at 0: cannot stash version 1: the newest is version 0"),
        (f"STASH0 STASH0 F0 B0 {END} POP0", "rank 0 at 1: cannot stash version 0: it is stashed already"),
        (f"F0 B0 POP0 {END}", "rank 0 at 2: version 0 is not stashed"),
    ],
)
def test_versions_that_are_not_there(line: str, expected: str) -> None:
    errors = reasons(f"rank 0: {line}", find_version_errors)
    assert any(error.startswith(expected) for error in errors), errors


@pytest.mark.parametrize(
    "line",
    [
        f"F0 B0 {END} F1 B1 {END}",
        f"F0v0 F1v0 B0v0 REDUCE NORM STASH0 UPDATE PUBLISH B1v0 POP0 {END}",
    ],
)
def test_versions_that_exist_are_accepted(line: str) -> None:
    assert reasons(f"rank 0: {line}", find_version_errors) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("GATHER F0 FREE B0", "rank 0 at 3: uses the weights of stage 0, which are not gathered"),
        ("GATHER F0 GATHER B0 FREE", "rank 0 at 2: the weights of stage 0 are gathered already"),
        ("GATHER F0 B0 FREE FREE", "rank 0 at 4: the weights of stage 0 are not gathered: nothing to free"),
        ("GATHER F0 B0", "rank 0 at 0: the weights of stage 0 are gathered and never freed"),
    ],
)
def test_gathers_without_a_partner(line: str, expected: str) -> None:
    assert expected in reasons(f"rank 0: {line} {END}", find_gather_errors)


def test_a_program_without_any_gather_needs_none() -> None:
    assert reasons(f"rank 0: F0 B0 {END}", find_gather_errors) == []
    assert reasons("rank 0: F0\nrank 1: GATHER F0 FREE", find_gather_errors) == [
        "rank 0 at 0: uses the weights of stage 0, which are not gathered"
    ]
