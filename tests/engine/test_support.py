"""What of a plan this version runs: every choice that it cannot is named, all at once."""

import pytest

from echelon.engine import support
from echelon.engine.support import refuse_unsupported
from echelon.errors import UserError
from echelon.plan import Plan


def test_what_this_version_cannot_run_is_refused_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_RUNS", {"zero": (0, 1), "sync": ("all-reduce",)})
    with pytest.raises(UserError, match="cannot run yet") as caught:
        refuse_unsupported(Plan.parse("data=2 zero=3"))
    assert caught.value.errors == ("zero=3 is not implemented yet (only zero=0, zero=1)",)
    with pytest.raises(UserError) as caught:
        refuse_unsupported(Plan.parse("data=2 sync=parameter-server"))
    assert "sync=parameter-server is not implemented yet (only sync=all-reduce)" in caught.value.errors


@pytest.mark.parametrize(
    "plan",
    [
        "data=1",
        "data=2 zero=3 precision=bf16",
        "data=2 sync=async staleness=inf",
        "tensor=2 context=2 pipeline=2",
        "tensor=2 compress=gist-fp8",
        "data=2 zero=3 offload=optimizer,parameters,activations",
        "offload=optimizer delay=1",
    ],
)
def test_what_runs_is_accepted(plan: str) -> None:
    refuse_unsupported(Plan.parse(plan))
