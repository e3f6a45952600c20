"""The bench `short-steps` works on a CPU too, where nothing is recorded."""

import pytest

from benchmarks import short_steps


@pytest.mark.slow
def test_rows_compare_steps_with_and_without_graphs_with_torch() -> None:
    settings, rows = short_steps.bench(quick=True)
    assert {row.baseline for row in rows} == {"torch", "echelon"}
    assert len({row.case for row in rows}) == 5
    assert len(rows) == 14
    assert all(row.extras["step_seconds"] > 0 for row in rows)
    assert all(row.extras.get("replayed", 0.0) == 0.0 for row in rows)
    assert settings["optimizer"] == "AdamW, fused"
