from typing import Any

import pytest

from echelon.errors import UserError
from echelon.launching.environment import variables_of


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
