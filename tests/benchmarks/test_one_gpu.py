"""The bench `one-gpu` works on a CPU too, where its figures mean nothing."""

import math

import pytest
from benchmarks.one_gpu import check_equal, idle_between

from benchmarks import one_gpu


@pytest.mark.slow
def test_rows_compare_echelon_with_torch_and_microbatches_with_one_batch() -> None:
    settings, rows = one_gpu.bench(quick=True)
    assert [(row.case, row.contender) for row in rows] == [
        ("small", "torch autocast"),
        ("small", "echelon"),
        ("small, microbatches=4", "one batch"),
        ("small, microbatches=4", "4 microbatches"),
    ]
    assert all(row.extras["tokens_per_second"] > 0 for row in rows)
    assert settings["precision"] == "bf16"


def test_losses_that_differ_give_no_result() -> None:
    with pytest.raises(RuntimeError, match="losses of torch and echelon differ"):
        check_equal("small", {"torch compiled": [4.0, 3.0], "echelon": [4.0, 2.9]})
    with pytest.raises(RuntimeError, match="losses of torch and echelon differ"):
        check_equal("small", {"torch autocast": [4.0, 3.0], "echelon": [3.9, 3.0]})
    check_equal("small", {"torch autocast": [4.0, 3.0], "echelon": [4.0, 2.9]})  # float32 weights, and bf16


def test_idle_is_what_no_interval_covers() -> None:
    head_start = (0.0, 4.0)
    assert idle_between([head_start, (4.0, 8.0), (6.0, 9.0), (10.0, 14.0)]) == pytest.approx(0.1)
    assert math.isclose(idle_between([(5.0, 8.0), head_start]), 0.25)
