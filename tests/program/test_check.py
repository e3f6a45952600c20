"""The check raises one error with every reason, and shows the marked grid."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import UserError
from echelon.program import Op, Program, build, check, complete
from tests.program.cases import program_of, programs, with_rank


def test_the_message_has_the_grid_the_instructions_and_the_reasons() -> None:
    program = build("1f1b", (1, 1), 2)
    dropped = next(one for one in program.ranks[0] if one.op is Op.SEND_ACTIVATION)
    invalid = with_rank(program, 0, [one for one in program.ranks[0] if one != dropped])
    with pytest.raises(UserError) as caught:
        check(invalid, lines={0: 4, 1: 5})
    assert str(caught.value) == (
        "1 error in schedule '1f1b', marked [ ] in the grid:\n\n"
        "time    0     1     2     3     4     5     6\n"
        "rank 0  F0    F1    ·     ·     ·     B0    B1\n"
        "rank 1  ·     ·     [RA0] F0    B0    F1    B1\n"
        "\n  - line 5, rank 1, RA0<0: rank 0 never sends it: it has no SA0>1"
    )


def test_an_error_of_the_update_is_marked_in_the_grid() -> None:
    with pytest.raises(UserError) as caught:
        check(program_of("rank 0: F0 B0 REDUCE UPDATE PUBLISH"))
    assert str(caught.value) == (
        "1 error in schedule 'schedule', marked [ ] in the grid:\n\n"
        "time    0   1   2\n"
        "rank 0  F0  B0  [U]\n"
        "\n  - rank 0, UPDATE: no NORM before it: put one between the last REDUCE and the UPDATE"
    )


def test_of_many_ranks_and_a_long_time_the_neighbourhood_is_shown() -> None:
    program = build("1f1b", (1,) * 40, 60)
    work = [one for one in program.ranks[20] if one[:3] != (Op.BACKWARD, 20, 50)]
    with pytest.raises(UserError) as caught:
        check(with_rank(program, 20, work))
    grid = caught.value.title.splitlines()
    rows = [line[:8].strip() for line in grid if line.startswith("rank")]
    assert rows[:3] == ["rank 19", "rank 20", "rank 21"]
    assert len(grid) < 30
    assert max(map(len, grid)) <= 100
    assert "[F50]" in caught.value.title


def test_a_valid_program_passes() -> None:
    check(build("zero-bubble", (2, 1, 3), 7))
    with pytest.raises(UserError, match="the backward of microbatch 0"):
        check(program_of("rank 0: F0 REDUCE NORM UPDATE PUBLISH"))
    check(program_of("rank 0: F0"), training=False)


@settings(deadline=None)
@given(programs(), st.booleans(), st.booleans())
def test_no_program_is_a_traceback(program: Program, training: bool, ties: bool) -> None:
    """Whatever can be written passes, or is rejected with sentences and a grid."""
    try:
        check(complete(program, ties=ties), training=training)
    except UserError as error:
        assert error.errors
        assert "time" in error.title


def test_not_more_than_a_thousand_errors_are_reported() -> None:
    program = build("gpipe", (1,), 2000)
    with pytest.raises(UserError) as caught:
        check(replace(program, ranks=(program.ranks[0] * 2,)))
    assert caught.value.errors[-1] == "and 7000 more"
