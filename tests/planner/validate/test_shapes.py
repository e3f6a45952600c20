"""Shapes of published runs."""

import pytest

from echelon.planner.validate.shapes import shape_of_row, usual_heads

ROW = {
    "model": "LLAMA3_70B", "layers": "80", "hidden": "8192", "heads": "64", "kv_heads": "8",
    "ffn": "28672", "vocab": "128256", "seq": "8192",
}  # fmt: skip


def test_families_by_name() -> None:
    llama = shape_of_row(ROW)
    assert llama.gated
    assert not llama.bias
    assert llama.num_parameters == pytest.approx(70.6e9, rel=0.001)
    gpt = shape_of_row(ROW | {"model": "GPT-70B", "kv_heads": "64"})
    assert gpt.bias
    assert gpt.dropout
    assert gpt.tied
    assert not shape_of_row(ROW | {"model": "MPT-70b"}).dropout


def test_experts_in_the_column_of_widths() -> None:
    row = ROW | {
        "model": "DeepSeekV3", "layers": "61", "hidden": "7168", "heads": "128", "kv_heads": "MLA",
        "ffn": "18432 dense/2048x256 experts top8+1 shared", "vocab": "129280",
    }  # fmt: skip
    assert shape_of_row(row).num_parameters == pytest.approx(671e9, rel=0.001)
    plain = shape_of_row(ROW | {"ffn": "2880x128 experts top4"})
    assert plain.experts is not None
    assert (plain.experts.number, plain.experts.top_k, plain.experts.shared, plain.ffn) == (128, 4, 0, 2880)


def test_heads_that_are_not_stated_are_about_128_wide() -> None:
    assert [usual_heads(hidden) for hidden in (12288, 1024, 14400)] == [96, 8, 120]
    assert shape_of_row(ROW | {"heads": "", "kv_heads": ""}).heads == 64
    bloom = ROW | {"heads": "", "kv_heads": "", "hidden": "14400"}
    assert shape_of_row(bloom | {"model": "GPT 78L h14400 (BLOOM tune-up)"}).heads == 96


def test_vocabularies_are_padded_for_tensor_ranks() -> None:
    assert shape_of_row(ROW | {"vocab": "50257", "tp": "8"}).vocab == 51200
