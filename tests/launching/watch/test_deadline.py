import math

import pytest

from echelon.errors import UserError
from echelon.launching.watch.deadline import FROM_ENVIRONMENT, deadline_seconds, operation_seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 1800.0), ("2.5", 2.5), ("none", None), ("None", None), ("inf", math.inf)]
)
def test_the_environment_says_how_long(
    text: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_DEADLINE", text)
    assert deadline_seconds(FROM_ENVIRONMENT) == seconds


def test_an_argument_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_DEADLINE", "7")
    assert deadline_seconds(3.0) == 3.0
    assert deadline_seconds(None) is None


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_what_is_no_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_DEADLINE", text)
    with pytest.raises(UserError, match=f"ECHELON_DEADLINE='{text}' in the environment: must be more than 0"):
        deadline_seconds(FROM_ENVIRONMENT)


def test_torch_waits_longer_than_the_deadline() -> None:
    assert operation_seconds(100.0) == 260.0
    assert operation_seconds(None) is None
