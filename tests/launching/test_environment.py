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
