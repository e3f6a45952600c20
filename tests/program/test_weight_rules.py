"""Rules of weights find missing versions, unpaired gathers, and gradients that come to no update."""

import pytest

from echelon.program.weight_rules import find_gather_errors, find_update_errors, find_version_errors
from tests.program.reasons import END, reasons


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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("F0 B0 UPDATE PUBLISH", "at 1: no REDUCE of stage 0 between this and the UPDATE"),
        ("F0 I0 W0 NORM UPDATE PUBLISH", "at 2: no REDUCE of stage 0 between this and the UPDATE"),
        ("F0 B0 REDUCE", "at 2: no UPDATE behind it: its gradient would be lost"),
        ("F0 B0", "at 1: no UPDATE behind it: its gradient would be lost"),
        (
            "F0 B0 REDUCE UPDATE PUBLISH",
            "at 3: no NORM before it: put one between the last REDUCE and the UPDATE",
        ),
        (
            "F0 B0 NORM REDUCE UPDATE PUBLISH",
            "at 2: a REDUCE of the same UPDATE stands behind it: put NORM behind the last REDUCE",
        ),
        ("F0 B0 REDUCE NORM NORM UPDATE PUBLISH", "at 4: a second NORM before one UPDATE: keep one"),
        ("F0 B0 REDUCE NORM UPDATE NORM PUBLISH", "at 5: no UPDATE behind it: nothing would use its result"),
        (
            "F0 B0 TIE REDUCE NORM UPDATE PUBLISH",
            "at 2: a REDUCE of the same UPDATE stands behind it: put TIE behind the last REDUCE",
        ),
        (
            "F0 B0 REDUCE NORM TIE UPDATE PUBLISH",
            "at 4: the NORM of the same UPDATE stands before it: put TIE between REDUCE and NORM",
        ),
        ("F0 B0 REDUCE NORM UPDATE TIE PUBLISH", "at 5: no UPDATE behind it: nothing would use its result"),
        ("F0 B0 REDUCE NORM UPDATE", "at 4: no PUBLISH behind it: replicas would keep the old weights"),
        (
            "PUBLISH F0 B0 REDUCE NORM UPDATE PUBLISH",
            "at 0: no UPDATE before it: there are no new weights to publish",
        ),
        (
            "F0 B0 REDUCE NORM UPDATE PUBLISH PUBLISH",
            "at 6: no UPDATE before it: there are no new weights to publish",
        ),
        (
            "F0 B0 REDUCE NORM UPDATE F1 B1 REDUCE NORM UPDATE PUBLISH",
            "at 4: no PUBLISH between this and the next computation: replicas would use old weights",
        ),
        (
            "F0 B0 REDUCE NORM UPDATE F1 PUBLISH B1 REDUCE NORM UPDATE PUBLISH",
            "at 4: no PUBLISH between this and the next computation: replicas would use old weights",
        ),
    ],
)
def test_each_wrong_order_is_reported(line: str, expected: str) -> None:
    assert f"rank 0 {expected}" in reasons(f"rank 0: {line}", find_update_errors)


@pytest.mark.parametrize(
    "line",
    [
        "F0 B0 REDUCE NORM UPDATE PUBLISH",
        "F0 B0 REDUCE TIE NORM UPDATE PUBLISH",
        "F0 B0 REDUCE F1 B1 REDUCE NORM UPDATE PUBLISH",
        "F0 B0 REDUCE NORM UPDATE PUBLISH F1 B1 REDUCE NORM UPDATE PUBLISH",
        "F0v0 B0v0 REDUCE NORM STASH0 UPDATE POP0 PUBLISH",
        "REDUCE NORM UPDATE PUBLISH",
        "",
    ],
)
def test_right_orders_are_accepted(line: str) -> None:
    assert reasons(f"rank 0: {line}", find_update_errors) == []


def test_each_stage_of_a_rank_is_reduced() -> None:
    text = "stage 0: 0\nstage 1: 0\nrank 0: F0@0 F0@1 B0@1 B0@0 REDUCE@0 NORM UPDATE PUBLISH"
    assert reasons(text, find_update_errors) == [
        "rank 0 at 2: no REDUCE of stage 1 between this and the UPDATE"
    ]
