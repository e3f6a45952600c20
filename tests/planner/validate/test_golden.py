"""Megatron-LM's own runs, and the peak of their last rank."""

import pytest

from echelon.errors import UserError
from echelon.planner.validate.columns import Row
from echelon.planner.validate.golden import is_golden, row_of_golden
from echelon.planner.validate.rows import read_rows, run_of
from tests.planner.shared_data import PUBLISHED_RUNS, needs_published_runs

ROW = {
    "file": "tests/functional_tests/test_cases/gpt/gpt3_mcore_te_tp1_pp4_vp1/golden_values_dev_dgx_h100.json",
    "gpu": "h100", "n_gpus": "8", "median_step_s": "0.1", "peak_mem_bytes": str(2**31), "num-layers": "12",
    "hidden-size": "512", "num-attention-heads": "8", "seq-length": "1024", "micro-batch-size": "4",
    "global-batch-size": "32", "pipeline-model-parallel-size": "4", "bf16": "True",
    "num-layers-per-virtual-pipeline-stage": "1",
}  # fmt: skip


def test_arguments_become_columns() -> None:
    assert is_golden(ROW)
    row = row_of_golden(ROW)
    assert (row["pp"], row["vpp"], row["zero_stage"], row["peak_mem_GiB"]) == ("4", "3", "0", "2.0")
    assert row["attention"] == "unfused"
    run = run_of(row)
    assert run.is_last_rank
    assert not run.practice.flash
    assert row_of_golden(ROW | {"context-parallel-size": "2"})["attention"] == "flash"
    renamed = ROW | {"file": ROW["file"].replace("vp1", "vp1_resume_torch_dist_muon")}
    assert row_of_golden(renamed)["attention"] == "unfused", "a name decides nothing"
    experts = row_of_golden(ROW | {"num-experts": "8", "use-distributed-optimizer": "True"})
    assert experts["ffn"] == "2048x8 experts top2"
    assert experts["zero_stage"] == "1"


def test_a_peak_that_is_no_number_is_refused() -> None:
    with pytest.raises(UserError, match="peak_mem_bytes"):
        row_of_golden(ROW | {"peak_mem_bytes": "much"})


def gaps(row: Row) -> tuple[float, float] | None:
    """How far the predicted peak is off: as the arguments say, and with the attention that is nearer."""
    found = []
    for attention in (row["attention"], "flash", "unfused"):
        try:
            run = run_of({**row, "attention": attention})
        except UserError:
            return None
        if not run.peak or run.peak <= 2**30:
            return None
        found.append(abs(run.predict().memory[-1].peak / run.peak - 1))
    return found[0], min(found[1:])


@needs_published_runs
def test_peaks_are_right_but_for_the_attention_that_nobody_states() -> None:
    found = [each for each in map(gaps, read_rows(PUBLISHED_RUNS / "megatron_golden.csv")) if each]
    assert len(found) > 300
    assert sum(gap <= 0.1 for gap, _ in found) >= 0.55 * len(found)
    assert sum(nearest <= 0.1 for _, nearest in found) >= 0.8 * len(found)
