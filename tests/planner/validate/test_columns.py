"""Cells of a row."""

import pytest

from echelon.errors import UserError
from echelon.planner.validate.columns import integer, measured, text


@pytest.mark.parametrize(
    ("cell", "number"), [("8", 8), ("8 local", 8), (">1", 1), ("1 (dist-opt)", 1), (" 3.0", 3)]
)
def test_integers_start_a_cell(cell: str, number: int) -> None:
    assert integer({"tp": cell}, "tp") == number


def test_cells_without_a_number() -> None:
    assert integer({"tp": "unspecified"}, "tp", 4) == 4
    assert text({}, "tp") == ""
    with pytest.raises(UserError, match="tp="):
        integer({"tp": ""}, "tp")
    assert measured({"s": "0.5"}, "s") == 0.5
    assert [measured({"s": cell}, "s") for cell in ("", "nan", "-1", "inf", "fast")] == [None] * 5
