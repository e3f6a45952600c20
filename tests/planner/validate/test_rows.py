"""Rows to runs."""

from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.planner.validate.rows import read_rows, run_of

ROW = {
    "source": "a paper", "model": "GPT 175B", "layers": "96", "hidden": "12288", "heads": "96",
    "kv_heads": "96", "ffn": "49152", "vocab": "51200", "seq": "2048", "gpu": "A100-80GB", "n_gpus": "64",
    "tp": "8", "pp": "8", "vpp": "3", "dp": "1", "zero_stage": "0", "recompute": "selective+SP",
    "global_batch": "64", "microbatch": "1", "precision": "fp16", "step_time_s": "13.75",
}  # fmt: skip


def test_a_row_becomes_settings() -> None:
    run = run_of(ROW | {"source": "Korthikanti"})
    assert run.shape.num_parameters == pytest.approx(175e9, rel=0.01)
    settings = run.settings
    assert (settings.tensor, settings.pipeline, settings.chunks, settings.microbatches) == (8, 8, 3, 64)
    assert settings.sequence
    assert settings.recompute == "selective"
    assert settings.schedule == "interleaved"
    assert run.seconds == 13.75


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("MXFP8", "fp8"),
        ("NVFP4", "fp4"),
        ("float8 rowwise", "bf16"),
        ("amp_bf16/DEFAULT", "bf16"),
        ("", "bf16"),
    ],
)
def test_precisions(words: str, precision: str) -> None:
    assert run_of(ROW | {"precision": words}).settings.precision == precision


def test_frozen_weights_have_no_gradients() -> None:
    settings = run_of(ROW | {"model": "Llama 2 70B LoRA", "precision": "fp8"}).settings
    assert settings.frozen
    assert settings.weight_bytes == 1


def test_seconds_from_rates() -> None:
    published = run_of(ROW | {"step_time_s": "", "tokens_per_s_per_gpu": "100"})
    assert published.seconds == pytest.approx(64 * 2048 / (100 * 64))
    flops = run_of(ROW | {"step_time_s": "", "measured_tflops_per_gpu": "160", "recompute": "full"})
    # Narayanan et al. 2021, equation 3: 96·B·s·l·h²·(1 + s/6h + V/16lh)
    h, layers = 12288, 96
    expected = 96 * 64 * 2048 * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
    assert flops.seconds == pytest.approx(expected / (160e12 * 64))
    gated = run_of(ROW | {"step_time_s": "", "measured_tflops_per_gpu": "160", "model": "Llama"})
    assert gated.seconds == pytest.approx(64 * gated.shape.step_flops(2048, 2048) / (160e12 * 64))
    assert run_of(ROW | {"step_time_s": ""}).seconds is None


def test_the_microbatch_that_nobody_stated_is_the_fastest_that_fits() -> None:
    unstated = run_of(ROW | {"microbatch": "", "gpu": "H100", "global_batch": "512"})
    stated = [
        run_of(ROW | {"microbatch": str(b), "gpu": "H100", "global_batch": "512"}) for b in (1, 2, 4, 8)
    ]
    fitting = [run.predict().step_seconds for run in stated if run.predict().fits]
    assert unstated.predict().step_seconds == min(fitting)


def test_chunks_that_a_row_leaves_out_are_those_of_another_row(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"vpp": ""}, ROW | {"vpp": "", "pp": "4"}, ROW | {"vpp": "", "model": "GPT 22B"}]
    (tmp_path / "runs.csv").write_text("\n".join([",".join(ROW), *(",".join(row.values()) for row in rows)]))
    assert [run_of(row).settings.chunks for row in read_rows(tmp_path / "runs.csv")] == [3, 3, 1, 1]


@pytest.mark.parametrize("column", ["layers", "hidden", "seq", "global_batch"])
def test_a_row_that_tells_too_little_is_refused(column: str) -> None:
    with pytest.raises(UserError, match=column):
        run_of(ROW | {column: "-"})


def test_a_file_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="lacks the columns"):
        read_rows(tmp_path / "other.csv")
