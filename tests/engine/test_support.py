"""What of a plan this version runs: every choice that it cannot is named, all at once."""

import pytest

from echelon.engine.support import refuse_unsupported
from echelon.errors import UserError
from echelon.plan import Plan


def test_what_this_version_cannot_run_is_refused_all_at_once() -> None:
    with pytest.raises(UserError, match="cannot run yet") as caught:
        refuse_unsupported(Plan.parse("data=2 expert=2 compress=gist offload=parameters"))
    names = ["expert", "offload", "compress"]
    assert [error.split("=")[0] for error in caught.value.errors] == names


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("data=2 expert=2", "expert=2 is not implemented yet (only expert=1)"),
        ("offload=parameters", "offload=parameters is not implemented yet (only offload=none, offload=opt"),
        ("compress=gist", "compress=gist is not implemented yet (only compress=none)"),
    ],
)
def test_a_choice_is_refused_with_those_that_run(plan: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        refuse_unsupported(Plan.parse(plan))
    assert caught.value.errors[0].startswith(message)


@pytest.mark.parametrize(
    "plan",
    [
        "data=1",
        "data=2 zero=3 precision=bf16",
        "data=2 sync=async staleness=inf",
        "tensor=2 context=2 pipeline=2",
    ],
)
def test_what_runs_is_accepted(plan: str) -> None:
    refuse_unsupported(Plan.parse(plan))
