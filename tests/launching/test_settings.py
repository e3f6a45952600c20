import math
from typing import Any

import pytest

from echelon.errors import UserError
from echelon.launching.settings import FROM_ENVIRONMENT, deadline_seconds, operation_seconds, variables_of


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


def test_each_rank_has_variables_of_its_own() -> None:
    assert variables_of(lambda rank: {"NCCL_HOSTID": f"host {rank}"}, 3) == {"NCCL_HOSTID": "host 3"}
    assert variables_of(None, 3) == {}


def test_all_errors_are_listed() -> None:
    wrong: Any = {"OMP_NUM_THREADS": 2, "RANK": "0", "WORLD_SIZE": "1"}
    with pytest.raises(UserError) as caught:
        variables_of(lambda _: wrong, 1)
    assert [error.split("=")[0] for error in caught.value.errors] == ["OMP_NUM_THREADS", "RANK", "WORLD_SIZE"]
    assert caught.value.title == "3 errors in environment(1):"


def test_what_is_no_function_or_returns_no_dict_is_refused() -> None:
    wrong: Any = {"A": "b"}
    with pytest.raises(UserError, match=r"environment={'A': 'b'}: must be a function of the rank"):
        variables_of(wrong, 0)
    nothing: Any = None
    with pytest.raises(UserError, match=r"environment\(2\) returned None: must return a dict of variables"):
        variables_of(lambda _: nothing, 2)
