"""Rules of the update: each rejected order, and those that are accepted."""

import pytest

from echelon.program.rules.update import find_update_errors
from tests.program.rules.reasons import reasons


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
