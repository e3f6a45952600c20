"""Whole programs by name: one stage, several, with gathers and tied weights."""

import pytest

from echelon.errors import UserError
from echelon.plan import ASYNCHRONOUS_SCHEDULES, SCHEDULES
from echelon.program import add_gathers, add_transfers, build, check, forward_only, show


def lines(text: str) -> list[str]:
    return [line.partition(": ")[2] for line in text.splitlines() if line.startswith("rank")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("naive", "F0 B0 F1 B1 F2 B2 F3 B3 REDUCE NORM UPDATE PUBLISH"),
        ("gpipe", "F0 F1 F2 F3 B0 B1 B2 B3 REDUCE NORM UPDATE PUBLISH"),
        ("1f1b", "F0 B0 F1 B1 F2 B2 F3 B3 REDUCE NORM UPDATE PUBLISH"),
        ("zero-bubble", "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 REDUCE NORM UPDATE PUBLISH"),
        ("pipedream", " ".join(f"F{k}v{k} B{k}v{k} REDUCE NORM UPDATE PUBLISH" for k in range(4))),
        ("pipedream-2bw", "F0v0 B0v0 F1v0 B1v0 F2v0 B2v0 F3v0 B3v0 REDUCE NORM UPDATE PUBLISH"),
    ],
)
def test_a_model_in_one_stage_has_the_program_of_its_schedule(name: str, expected: str) -> None:
    program = build(name, (1,), 4)
    assert lines(show(program)) == [expected]
    check(program)


def test_one_stage_gathers_its_weights_for_each_use() -> None:
    assert lines(show(build("gpipe", (1,), 2, gather=True))) == [
        "GATHER F0 FREE GATHER F1 FREE GATHER B0 FREE GATHER B1 FREE REDUCE NORM UPDATE PUBLISH"
    ]
    evaluation = add_gathers(add_transfers(forward_only(((0,),), 2)))
    assert lines(show(evaluation)) == ["GATHER F0 FREE GATHER F1 FREE"]
    check(evaluation, training=False)


def test_tied_weights_are_summed_by_every_rank_between_reduce_and_norm() -> None:
    program = build("interleaved", (1, 1), 2, 2, ties=True)
    assert [line.partition("REDUCE")[2] for line in lines(show(program))] == [
        "@0 REDUCE@2 TIE NORM UPDATE PUBLISH",
        "@1 REDUCE@3 TIE NORM UPDATE PUBLISH",
    ]
    check(program)


@pytest.mark.parametrize("name", ASYNCHRONOUS_SCHEDULES)
def test_stages_that_update_at_different_times_cannot_be_tied(name: str) -> None:
    with pytest.raises(UserError, match=f"schedule={name}: tied stages would update at different times"):
        build(name, (1, 1), 2, ties=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_asynchronous_schedules_have_weight_versions(name: str) -> None:
    program = build(name, (1, 1), 2, 2 if name == "interleaved" else 1)
    assert program.versioned == (name in ASYNCHRONOUS_SCHEDULES)
