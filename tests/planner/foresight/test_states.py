"""Model state: the table of ZeRO, to its digits."""

import csv

import pytest

from echelon.planner.foresight.states import StateBytes, state_bytes
from tests.planner.shared_data import PUBLISHED_RUNS, needs_published_runs


@needs_published_runs
def test_zeros_own_table_to_its_digits() -> None:
    with (PUBLISHED_RUNS / "zero_memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = ("baseline_GB", "Pos_GB", "Pos_g_GB", "Pos_g_p_GB")
    for row in rows:
        for zero, column in enumerate(columns):
            size = state_bytes(float(row["psi_B"]), int(row["Nd"]), zero).total
            # A half at the third digit is rounded either way in the table.
            assert abs(size - float(row[column])) <= 0.5000001 * 10 ** -len(row[column].partition(".")[2]), (
                row
            )
    assert len(rows) == 18


@pytest.mark.parametrize(("zero", "expected"), [(0, 16), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)])
def test_bytes_per_parameter(zero: int, expected: float) -> None:
    assert state_bytes(1e9, 64, zero).total == pytest.approx(expected * 1e9)


def test_categories() -> None:
    assert state_bytes(1.0, gradient=4.0) == StateBytes(2.0, 4.0, 12.0)
