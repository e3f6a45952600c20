"""Values of a config at the borders of each kind."""

import math
from types import SimpleNamespace

import pytest

from echelon.models.value_checks import value_errors

VALID = {
    "count": [1, 2**62],
    "count or 0": [0, 1],
    "number": [1, 1e-9],
    "weight": [0, 0.0, 2.5],
    "fraction": [0, 0.999],
    "flag": [True, False],
}
WRONG = {
    "count": [0, -1, 1.0, True, None, "1"],
    "count or 0": [-1, 0.0, False],
    "number": [0, -1, math.inf, math.nan, True, "1"],
    "weight": [-0.1, math.inf, math.nan, True, None],
    "fraction": [1, 1.0, -0.1, math.nan, False],
    "flag": [0, 1, None, "true"],
}


@pytest.mark.parametrize("kind", VALID)
def test_each_kind_has_its_borders(kind: str) -> None:
    for value in VALID[kind]:
        assert value_errors(SimpleNamespace(a=value), kind, "a") == []
    for value in WRONG[kind]:
        (error,) = value_errors(SimpleNamespace(a=value, b=VALID[kind][0]), kind, "a", "b")
        assert error.startswith(f"a={value!r}: must be ")
