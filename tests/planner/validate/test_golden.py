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
    experts = row_of_golden(ROW | {"num-experts": "8", "use-distributed-optimizer": "True"})
    assert experts["ffn"] == "2048x8 experts top2"
    assert experts["zero_stage"] == "1"


def test_proxies_of_deepseek_have_its_experts_and_attention() -> None:
    name = "mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release"
    row = ROW | {"file": f"{FOLDER}{name}/golden_values.json", "n_gpus": "", "num-layers": "14"}
    row |= {"num-experts": "64", "expert-model-parallel-size": "16", "expert-tensor-parallel-size": "1"}
    run = run_of(
        row_of_golden(row | {"num-layers-per-virtual-pipeline-stage": "", "ffn-hidden-size": "18432"})
    )
    experts = run.shape.experts
    assert experts is not None
    assert (experts.number, experts.hidden, experts.top_k, experts.first_dense) == (64, 2048, 8, 3)
    assert run.shape.latent is not None
    assert run.cluster.count == 4 * 16  # of 4 stages with 16 ranks for experts: not the usual 8


def test_tests_on_one_node_say_so() -> None:
    for name, host in (("gpt3_mcore_te_tp2_pp2_mla_1node", "one node"), ("gpt3_mcore_te_tp2_pp2_mla", "")):
        assert row_of_golden(ROW | {"file": f"{FOLDER}gpt/{name}/golden_values.json"})["host"] == host


def test_a_peak_that_is_no_number_is_refused() -> None:
    with pytest.raises(UserError, match="peak_mem_bytes"):
        row_of_golden(ROW | {"peak_mem_bytes": "much"})


FOLDER = "tests/functional_tests/test_cases/"


@pytest.mark.parametrize(
    ("test", "changes", "attention"),
    [
        ("gpt/gpt3_mcore_te_tp1_pp4_vp1", {}, "unfused"),
        ("gpt/gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist", {}, "flash"),
        ("gpt/gpt3_mcore_tp1_pp1_resume_torch_dist", {}, "unfused"),
        ("gpt/gpt3_mcore_tp1_pp1_resume_torch_dist", {"transformer-impl": "transformer_engine"}, "flash"),
        ("gpt/gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion", {}, "flash"),
        ("bert/bert_mcore_tp2_pp2_resume_torch_dist", {}, "unfused"),
        ("gpt/gpt3_mcore_te_tp1_pp4_vp1", {"attention-backend": "auto"}, "flash"),
        ("gpt/gpt3_mcore_te_tp1_pp4_resume_torch", {"attention-backend": "unfused"}, "unfused"),
    ],
)
def test_what_configurations_of_tests_say_beyond_the_table(
    test: str, changes: dict[str, str], attention: str
) -> None:
    assert (
        row_of_golden(ROW | {"file": f"{FOLDER}{test}/golden_values.json"} | changes)["attention"]
        == attention
    )


def test_virtual_stages_without_their_layers() -> None:
    row = ROW | {
        "file": f"{FOLDER}gpt/gpt3_tp1_pp4_vp2_account/golden_values.json",
        "num-layers-per-virtual-pipeline-stage": "",
    }
    assert row_of_golden(row)["vpp"] == "2"
    assert row_of_golden(row | {"num-virtual-stages-per-pipeline-rank": "3"})["vpp"] == "3"


def test_a_fused_loss_holds_logits_twice() -> None:
    row = ROW | {"attention-backend": "unfused"}
    plain, fused = (
        run_of(row_of_golden(row | {"cross-entropy-loss-fusion": stated})) for stated in ("False", "True")
    )
    logits = 4 * 1024 * plain.shape.vocab
    assert fused.predict().memory[-1].peak - plain.predict().memory[-1].peak == pytest.approx(4 * logits)


def test_workspaces_of_libraries_count() -> None:
    assert run_of(row_of_golden(ROW)).overhead == 64 * 2**20
    assert run_of(row_of_golden(ROW | {"gpu": "a100"})).overhead == 36 * 2**20
    assert run_of(row_of_golden(ROW | {"transformer-impl": "local"})).overhead == 32 * 2**20


def gap(row: Row) -> float | None:
    """How far the predicted peak is off; None for what was refused, and for peaks of at most 1 GiB."""
    try:
        run = run_of(row)
    except UserError:
        return None
    if not run.peak or run.peak <= 2**30:
        return None
    return abs((run.predict().memory[-1].peak + run.overhead) / run.peak - 1)


@needs_published_runs
def test_peaks_of_the_last_rank() -> None:
    rows = read_rows(PUBLISHED_RUNS / "megatron_golden.csv")
    gaps = [found for row in rows if (found := gap(row)) is not None]
    assert len(gaps) > 300
    assert sum(gap <= 0.1 for gap in gaps) >= 0.8 * len(gaps)
