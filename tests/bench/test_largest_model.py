"""The bench of the largest model, small: all weights change, and some of them lie in host memory."""

import pytest

from echelon.bench import run


def test_small_models_train_with_weights_in_host_memory() -> None:
    result = run("largest-model", quick=True)
    assert [row.case for row in result.rows] == ["small", "small, half resident"]
    assert all("offload=parameters" in plan for plan in result.settings["plans"].values())
    assert result.settings["unchanged_weights"] == {"small": [], "small, half resident": []}
    whole, half = (row.extras for row in result.rows)
    weights = 2 * result.settings["parameters"]["small"]
    assert whole["resident_bytes"] == 0
    assert weights <= whole["host_bytes"] <= 1.2 * weights
    assert 0 < half["host_bytes"] < whole["host_bytes"]
    losses = result.settings["losses"]
    assert losses["small"] == losses["small, half resident"]
    assert losses["small"][-1] < losses["small"][0]


@pytest.mark.slow
def test_a_part_of_the_sizes_can_be_chosen() -> None:
    result = run("largest-model", quick=True, only="half")
    assert [row.case for row in result.rows] == ["small, half resident"]
